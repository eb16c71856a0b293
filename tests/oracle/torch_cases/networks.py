"""Products, convolutions, norms, activations, attention, losses, resampling."""

import torch
import torch.nn.functional as F

from . import Case, bools, fixed, ints, of, positive, unit

A = (3, 4)
WIDE = dict(relative=64, absolute=64)
ACTIVATIONS = """relu relu6 silu mish hardswish hardsigmoid hardtanh selu elu celu leaky_relu softplus logsigmoid gelu
softsign tanhshrink hardshrink softshrink""".split()


def sdpa(**options):
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def cases():
    for name in ACTIVATIONS:
        yield Case(name, lambda x, f=getattr(F, name): f(x), ((5, 7),), relative=64, absolute=16)
    yield Case("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), (A,), **WIDE)
    yield Case("elu_options", lambda x: (F.elu(x, 0.7), F.leaky_relu(x, 0.3), F.softplus(x, 2, 3), F.hardtanh(x, -2, 0.5),
                                         F.threshold(x, 0.1, 20), F.celu(x, 1.3)), (A,), **WIDE)
    yield Case("prelu", F.prelu, ((2, 3, 4), (3,)))
    yield Case("prelu_one", F.prelu, (A, (1,)))
    yield Case("glu", lambda x: (F.glu(x), F.glu(x, 0)), ((4, 6),))
    yield Case("softmax", lambda x: (x.softmax(-1), x.softmax(0), F.softmax(x, 1, dtype=torch.float32)), (A,), **WIDE)
    yield Case("softmax_half", lambda x: (x.softmax(-1), F.softmax(x, -1, dtype=torch.float32)), (of(torch.bfloat16, *A),), trained=())
    yield Case("log_softmax", lambda x: (x.log_softmax(-1), x.log_softmax(0)), (A,), **WIDE)
    yield Case("softmin", lambda x: F.softmin(x, -1), (A,), **WIDE)

    for name, shapes in dict(matrices=((3, 4), (4, 5)), batched=((2, 3, 4), (2, 4, 5)), broadcast=((2, 1, 3, 4), (5, 4, 2)),
                             vector=((2, 3, 4), (4,)), row=((4,), (2, 4, 5)), dot=((4,), (4,)), by_matrix=((2, 3, 4), (4, 5))).items():
        yield Case(f"matmul_{name}", torch.matmul, shapes, **WIDE)
    yield Case("mm_bmm", lambda x, y: (torch.mm(x[0], y[0]), torch.bmm(x, y), torch.mv(x[0], y[0, :, 0]), torch.dot(x[0, 0], y[0, :, 0])),
               ((2, 3, 4), (2, 4, 5)), **WIDE)
    yield Case("addmm", lambda b, x, y: (torch.addmm(b, x, y), torch.addmm(b, x, y, beta=0.5, alpha=2), torch.addmm(b, x, y, beta=0)), ((5,), (3, 4), (4, 5)), **WIDE)
    yield Case("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, beta=0.5, alpha=2), ((2, 3, 5), (2, 3, 4), (2, 4, 5)), **WIDE)
    yield Case("linear", F.linear, ((2, 3, 4), (5, 4), (5,)), **WIDE)
    yield Case("linear_plain", lambda x, w: F.linear(x, w), ((3, 4), (5, 4)), **WIDE)
    yield Case("outer", torch.outer, ((3,), (4,)))
    for i, (equation, shapes) in enumerate((
        ("ij,jk->ik", ((3, 4), (4, 5))), ("bij,bjk->bik", ((2, 3, 4), (2, 4, 5))), ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
        ("ij->ji", ((3, 4),)), ("ij->", ((3, 4),)), ("ij,j", ((3, 4), (4,))), ("i,j->ij", ((3,), (4,))),
        ("...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5))), ("bi,bj,bk->ijk", ((2, 3), (2, 4), (2, 5))), ("b...d,ed->b...e", ((2, 3, 4), (5, 4))),
        ("bqhd,bkhd->bhqk", ((2, 3, 4, 5), (2, 6, 4, 5))), ("ik,jk", ((3, 4), (5, 4))))):
        yield Case(f"einsum_{i}", lambda *x, e=equation: torch.einsum(e, *x), shapes, **WIDE)

    x1, x2, x3 = (2, 4, 9), (2, 4, 8, 7), (1, 2, 5, 5, 5)
    yield Case("conv1d", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), (x1, (6, 4, 3), (6,)), **WIDE)
    yield Case("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (x2, (6, 4, 3, 3), (6,)), **WIDE)
    yield Case("conv2d_strided", lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (x2, (6, 4, 3, 3)), **WIDE)
    yield Case("conv2d_groups", lambda x, w: F.conv2d(x, w, groups=2), (x2, (6, 2, 3, 3)), **WIDE)
    yield Case("conv2d_depthwise", lambda x, w: F.conv2d(x, w, groups=4, padding=2), (x2, (8, 1, 5, 5)), **WIDE)
    yield Case("conv2d_same", lambda x, w: (F.conv2d(x, w, padding="same"), F.conv2d(x, w, padding="valid")), (x2, (6, 4, 3, 2)), **WIDE)
    yield Case("conv2d_single", lambda x, w: F.conv2d(x, w), ((4, 8, 7), (6, 4, 3, 3)), **WIDE)
    yield Case("conv3d", lambda x, w: F.conv3d(x, w, padding=1, stride=2), (x3, (3, 2, 3, 3, 3)), **WIDE)
    yield Case("conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1, output_padding=1), (x1, (4, 3, 3)), **WIDE)
    yield Case("conv_transpose2d", lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (x2, (4, 3, 2, 2), (3,)), **WIDE)
    yield Case("conv_transpose2d_groups", lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1, groups=2, dilation=2), (x2, (4, 3, 3, 3)), **WIDE)

    yield Case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), ((2, 4, 6), (6,), (6,)), **WIDE)
    yield Case("layer_norm_two", lambda x: F.layer_norm(x, (4, 6), eps=1e-3), ((2, 4, 6),), **WIDE)
    yield Case("rms_norm", lambda x, w: (F.rms_norm(x, (6,), w), F.rms_norm(x, (6,), eps=1e-5)), ((2, 4, 6), (6,)), **WIDE)
    yield Case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), ((2, 6, 3, 3), (6,), (6,)), **WIDE)
    yield Case("instance_norm", lambda x: F.instance_norm(x), ((2, 6, 3, 3),), **WIDE)
    yield Case("batch_norm", lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b), ((2, 6, 3, 3), (6,), positive(6), (6,), (6,)), trained=(0, 3, 4), **WIDE)
    yield Case("batch_norm_training", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), ((4, 6, 3, 3), (6,), (6,)), **WIDE)
    yield Case("batch_norm_1d", lambda x: F.batch_norm(x, torch.zeros(6), torch.ones(6), training=True), ((8, 6),), **WIDE)

    yield Case("max_pool", lambda x: (F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, 2, ceil_mode=True), F.max_pool1d(x[0], 3)), (x2,))
    yield Case("avg_pool", lambda x: (F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
                                      F.avg_pool2d(x, 3, 2, ceil_mode=True), F.avg_pool1d(x[0], 3), F.avg_pool2d(x, 2, divisor_override=3)), (x2,))
    yield Case("adaptive_avg_pool", lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (4, 7)), F.adaptive_avg_pool2d(x, (3, 2)),
                                               F.adaptive_avg_pool2d(x, (None, 2)), F.adaptive_avg_pool1d(x[0], 7)), (x2,))
    yield Case("adaptive_max_pool", lambda x: (F.adaptive_max_pool2d(x, 1), F.adaptive_max_pool2d(x, (4, 7))), (x2,))
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        yield Case(f"interpolate_{mode}", lambda x, m=mode: (F.interpolate(x, scale_factor=2, mode=m), F.interpolate(x, size=(5, 11), mode=m)), (x2,), **WIDE)
    for mode in ("bilinear", "bicubic"):
        yield Case(f"interpolate_{mode}_corners", lambda x, m=mode: F.interpolate(x, size=(5, 11), mode=m, align_corners=True), (x2,), **WIDE)
    yield Case("interpolate_linear", lambda x: (F.interpolate(x, size=20, mode="linear"), F.interpolate(x, scale_factor=3)), (x1,), **WIDE)

    q, k, grouped = (2, 4, 5, 8), (2, 4, 7, 8), (2, 2, 7, 8)
    yield Case("sdpa", sdpa(), (q, k, k), **WIDE)
    yield Case("sdpa_causal", sdpa(is_causal=True), (q, q, q), **WIDE)
    yield Case("sdpa_causal_longer", sdpa(is_causal=True), (q, k, k), **WIDE)
    yield Case("sdpa_scale", sdpa(scale=0.3), (q, k, (2, 4, 7, 6)), **WIDE)
    yield Case("sdpa_mask", sdpa(), (q, k, k, lambda g: torch.rand(2, 1, 5, 7, generator=g) < 0.9), **WIDE)
    yield Case("sdpa_bias", sdpa(), (q, k, k, (1, 4, 5, 7)), trained=(0, 1, 2), **WIDE)
    yield Case("sdpa_grouped", sdpa(enable_gqa=True, is_causal=True), ((2, 4, 7, 8), grouped, grouped), **WIDE)
    yield Case("sdpa_grouped_mask", sdpa(enable_gqa=True), (q, grouped, grouped, lambda g: torch.rand(2, 4, 5, 7, generator=g) < 0.9), **WIDE)
    yield Case("sdpa_three", sdpa(), ((2, 5, 8), (2, 7, 8), (2, 7, 8)), **WIDE)
    yield Case("sdpa_repeated", lambda q, k, v: F.scaled_dot_product_attention(q, *(repeated(x) for x in (k, v)), is_causal=True),
               ((2, 4, 7, 8), grouped, grouped), **WIDE)
    yield Case("multi_head_attention", attend, ((2, 5, 8), (24, 8), (8, 8)), **WIDE)

    yield Case("cross_entropy", F.cross_entropy, ((6, 5), ints(5, 6)), trained=(0,), **WIDE)
    yield Case("cross_entropy_ignored", F.cross_entropy, ((6, 5), lambda g: torch.tensor([1, -100, 3, 0, -100, 4])), trained=(0,), **WIDE)
    yield Case("cross_entropy_images", F.cross_entropy, ((2, 5, 3, 3), ints(5, 2, 3, 3)), trained=(0,), **WIDE)
    yield Case("cross_entropy_options", lambda x, t, w: (F.cross_entropy(x, t, weight=w), F.cross_entropy(x, t, reduction="sum"),
                                                         F.cross_entropy(x, t, reduction="none"), F.cross_entropy(x, t, label_smoothing=0.1),
                                                         F.cross_entropy(x, t, weight=w, label_smoothing=0.2, ignore_index=2)),
               ((6, 5), ints(5, 6), positive(5)), trained=(0,), **WIDE)
    yield Case("cross_entropy_soft", lambda x, t: F.cross_entropy(x, t.softmax(-1)), ((6, 5), (6, 5)), **WIDE)
    yield Case("nll_loss", lambda x, t: F.nll_loss(x.log_softmax(1), t, ignore_index=1), ((6, 5), ints(5, 6)), trained=(0,), **WIDE)
    yield Case("triplets", lambda x, y, z: (F.triplet_margin_loss(x, y, z), F.triplet_margin_loss(x, y, z, margin=0.5, swap=True, reduction="none")),
               ((5, 6), (5, 6), (5, 6)), **WIDE)
    signs = fixed(1, -1, -1, 1, -1)
    yield Case("embedding_losses", lambda x, y, t: (F.cosine_embedding_loss(x, y, t), F.cosine_embedding_loss(x, y, t, margin=-0.2, reduction="none"),
                                                    F.hinge_embedding_loss(x[:, 0], t), F.hinge_embedding_loss(x[:, 0], t, margin=0.4, reduction="sum")),
               ((5, 6), (5, 6), signs), trained=(0, 1), **WIDE)
    yield Case("margin_ranking", lambda x, y, t: (F.margin_ranking_loss(x, y, t), F.margin_ranking_loss(x, y, t, margin=0.3, reduction="none")),
               ((5,), (5,), signs), trained=(0, 1), **WIDE)
    yield Case("poisson", lambda x, t: (F.poisson_nll_loss(x, t), F.poisson_nll_loss(x, t, full=True, reduction="none"), F.poisson_nll_loss(x.exp(), t, log_input=False)),
               ((7,), fixed(0.0, 1, 2, 3, 5, 1, 8)), trained=(0,), **WIDE)
    yield Case("regressions", lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y, beta=0.5), F.huber_loss(x, y, delta=0.7),
                                            F.mse_loss(x, y, reduction="sum"), F.mse_loss(x, y, reduction="none")), (A, A), **WIDE)
    yield Case("binary_cross_entropy", F.binary_cross_entropy, (unit(*A), unit(*A)), trained=(0,), **WIDE)
    yield Case("binary_cross_entropy_with_logits", lambda x, t, w: (F.binary_cross_entropy_with_logits(x, t),
                                                                    F.binary_cross_entropy_with_logits(x, t, pos_weight=w)),
               (A, unit(*A), positive(4)), trained=(0,), **WIDE)
    yield Case("kl_div", lambda x, t: (F.kl_div(x, t, reduction="batchmean"), F.kl_div(x, t.log(), log_target=True)), (A, unit(*A)), trained=(0,), **WIDE)
    yield Case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), (A, A), **WIDE)
    yield Case("dropout_off", lambda x: F.dropout(x, 0.5, False) + F.dropout(x, 0.0, True), (A,))
    yield Case("grouped_mm", moe, (of(torch.bfloat16, 8, 8), of(torch.bfloat16, 3, 8, 8)), trained=())


def repeated(x):
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, 2, t, d).reshape(b, 2 * h, t, d)


def attend(x, w, o):
    b, s, d = x.shape
    q, k, v = (part.view(b, s, 2, d // 2).transpose(1, 2) for part in F.linear(x, w).chunk(3, -1))
    weights = (q @ k.transpose(-2, -1) / 2).masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
    return F.linear((weights @ v).transpose(1, 2).reshape(b, s, d), o)


def moe(x, w):
    return F.grouped_mm(x, w, offs=torch.tensor([2, 5, 8], dtype=torch.int32))
