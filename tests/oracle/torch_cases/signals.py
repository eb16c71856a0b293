"""Complex numbers, Fourier transforms, images read at positions, small linear systems, distances, maps and scans."""

import torch
import torch.nn.functional as F
import torchvision
from torch._higher_order_ops.map import map as each
from torch._higher_order_ops.scan import scan

from . import Case, bools, fixed, ints, positive

WIDE = dict(relative=64, absolute=64)
ROUGH = dict(relative=256, absolute=256)
C = torch.view_as_complex
R = torch.view_as_real


def complex_numbers():
    a, b = (3, 4, 2), (3, 4, 2)
    yield Case("complex_products", lambda x, y: (R(C(x) * C(y)), R(C(x) / C(y)), R(C(x) * 1j), R(C(x) * 2.5), R(C(x) + C(y) - 1), R(1 / C(x))), (a, b), **WIDE)
    yield Case("complex_real", lambda x, y: (R(C(x) * y), R(y * C(x)), R(C(x) / (y + 9)), R(C(x) + y), R(y - C(x)), R(torch.complex(y, y * 2))), (a, (3, 4)), **WIDE)
    yield Case("complex_parts", lambda x: (C(x).real, C(x).imag, C(x).abs(), C(x).angle(), R(C(x).conj().resolve_conj()), R(C(x).conj() * C(x))), (a,), **WIDE)
    yield Case("complex_functions", lambda x: (R(C(x).exp()), R(C(x).log()), R(C(x).sqrt()), R(C(x) ** 3), R(C(x).square()), R(C(x).reciprocal())), (a,), **WIDE)
    yield Case("polar", lambda r, t: R(torch.polar(r, t)), (positive(3, 4), (3, 4)), **WIDE)
    yield Case("complex_moved", lambda x: (R(C(x).reshape(2, 6)), R(C(x).transpose(0, 1)), R(C(x)[1:, None]), R(torch.cat([C(x), C(x) * 2], -1)), R(C(x).flip(0)), R(C(x).sum(0)), R(C(x).mean()), R(C(x).unsqueeze(1).expand(3, 2, 4)), R(torch.stack([C(x)] * 2)), R(C(x).roll(1, 1)), R(-C(x))), (a,), **WIDE)
    yield Case("complex_chosen", lambda x, y, m: (R(torch.where(m, C(x), C(y))), R(C(x).masked_fill(m, 0)), R(C(x)[:, [0, 2, 2]]), R(C(x).index_select(0, torch.tensor([2, 0])))), (a, b, bools(3, 4)), **WIDE)
    yield Case("complex_matmul", lambda x, y: (R(C(x) @ C(y).T), R(torch.einsum("ij,kj->ik", C(x), C(y))), R(F.linear(C(x), C(y)))), (a, b), **WIDE)

    def written(x):
        y = torch.zeros(3, 6, dtype=torch.cfloat)
        y[:, 1:5] = C(x)
        y[0, 0] += 2 + 1j
        y *= 1j
        return R(y), y.imag

    yield Case("complex_written", written, (a,), **WIDE)
    yield Case("complex_made", lambda x: (R(torch.ones(3, 4, dtype=torch.cfloat) * C(x)), R(torch.ones_like(C(x))), R(torch.zeros_like(C(x)) + C(x)), R(torch.full((3, 4), 2.0, dtype=torch.cfloat) - C(x)), R(x[..., 0].to(torch.cfloat))), (a,), **WIDE)


def transforms():
    for n in (1, 2, 7, 16, 96, 128, 131, 210):
        yield Case(f"fft_{n}", lambda x: (R(torch.fft.fft(C(x))), R(torch.fft.ifft(C(x), dim=-1, norm="ortho")), R(torch.fft.rfft(x[..., 0])), R(torch.fft.fft(x[..., 0], dim=-1))), ((2, n, 2),), **ROUGH)
        yield Case(f"irfft_{n}", lambda x, n=n: torch.fft.irfft(C(x), n=n), ((2, n // 2 + 1, 2),), **ROUGH)
    yield Case("fft_dims", lambda x: (R(torch.fft.fft2(x)), R(torch.fft.rfft2(x, norm="forward")), R(torch.fft.ifft2(x)), R(torch.fft.fftn(x, dim=(0, 2))), R(torch.fft.rfftn(x)), torch.fft.irfft2(torch.fft.rfft2(x)), R(torch.fft.fft(x, dim=1))), ((3, 6, 8),), **ROUGH)
    yield Case("fft_sizes", lambda x: (R(torch.fft.fft(x, n=5)), R(torch.fft.fft(x, n=12)), R(torch.fft.rfft2(x, s=(4, 10))), torch.fft.irfft(torch.fft.rfft(x), n=9), torch.fft.irfftn(torch.fft.rfftn(x), s=(6, 8))), ((3, 6, 8),), **ROUGH)
    yield Case("fft_shift", lambda x: (torch.fft.fftshift(x), torch.fft.ifftshift(x, dim=1), torch.fft.fftfreq(7) + x.sum(), torch.fft.rfftfreq(8, 0.5) + x.sum()), ((3, 5),), **WIDE)
    yield Case("stft", lambda x: (R(torch.stft(x, 16, 4, window=torch.hann_window(16), return_complex=True)), R(torch.stft(x, 16, window=torch.hamming_window(12), win_length=12, center=False, onesided=False, normalized=True, return_complex=True))), ((2, 64),), **ROUGH)
    yield Case("istft", lambda x: torch.istft(C(x), 16, 4, window=torch.hann_window(16)), ((2, 9, 17, 2),), **ROUGH)
    yield Case("convolved_by_fft", lambda x, w: torch.fft.irfft(torch.fft.rfft(x, n=32) * torch.fft.rfft(w, n=32), n=32)[..., :16], ((2, 3, 16), (3, 16)), **ROUGH)


def sampling():
    grid = lambda *shape: lambda g: torch.rand(shape, generator=g) * 2.6 - 1.3
    for mode in ("bilinear", "nearest", "bicubic"):
        for pad in ("zeros", "border", "reflection"):
            corners = pad == "border"
            trained = (0,) if mode == "nearest" else (0, 1)
            yield Case(f"grid_sample_{mode}_{pad}", lambda x, g, o=dict(mode=mode, padding_mode=pad, align_corners=corners): F.grid_sample(x, g, **o), ((2, 3, 5, 6), grid(2, 4, 3, 2)), trained=trained, **ROUGH)
    yield Case("grid_sample_volume", lambda x, g: F.grid_sample(x, g, align_corners=False), ((1, 2, 4, 5, 6), grid(1, 2, 3, 3, 3)), **ROUGH)
    yield Case("affine_grid", lambda t: (F.affine_grid(t, (2, 3, 4, 5), align_corners=False), F.affine_grid(t, (2, 3, 4, 5), align_corners=True)), ((2, 2, 3),), **WIDE)
    yield Case("affine_grid_volume", lambda t: F.affine_grid(t, (2, 3, 4, 5, 3), align_corners=False), ((2, 3, 4),), **WIDE)
    boxes = fixed([0.0, 1, 1, 9, 9], [1, 0, 2, 7, 15], [1, -3, 4, 40, 6])
    yield Case("roi_align", lambda x, b: (torchvision.ops.roi_align(x, b, (3, 2), 0.5, 2, True), torchvision.ops.roi_align(x, b, 3, 1.0, 1, False)), ((2, 3, 8, 8), boxes), trained=(0,), **ROUGH)
    yield Case("deform_conv2d", lambda x, o, w, m: torchvision.ops.deform_conv2d(x, o, w, padding=1, mask=m), ((2, 4, 5, 6), (2, 36, 5, 6), (6, 2, 3, 3), (2, 18, 5, 6)), **ROUGH)
    yield Case("deform_conv2d_strided", lambda x, o, w, b: torchvision.ops.deform_conv2d(x, o, w, b, stride=(2, 1), dilation=(1, 2)), ((2, 3, 7, 8), (2, 18, 3, 4), (2, 3, 3, 3), (2,)), **ROUGH)


def systems():
    def spd(x):
        return x @ x.transpose(-1, -2) + 0.5 * torch.eye(x.shape[-1])

    x, b = (2, 5, 5), (2, 5, 3)
    yield Case("cholesky", lambda x: torch.linalg.cholesky(spd(x)), (x,), **ROUGH)
    yield Case("cholesky_upper", lambda x: torch.linalg.cholesky(spd(x), upper=True), (x,), **ROUGH)
    lower = lambda x: x.tril() * 0.3 + 2 * torch.eye(5)
    yield Case("solve_triangular", lambda x, b: (torch.linalg.solve_triangular(lower(x), b, upper=False), torch.linalg.solve_triangular(lower(x).mT, b, upper=True), torch.linalg.solve_triangular(lower(x), b.mT, upper=False, left=False)), (x, b), **ROUGH)
    yield Case("solve", lambda x, b: (torch.linalg.solve(x, b), torch.linalg.solve(x, b[0, :, 0])), (x, b), relative=4096, absolute=4096)
    yield Case("inverse", lambda x: (torch.linalg.inv(spd(x)), torch.inverse(x)), (x,), relative=4096, absolute=4096)
    yield Case("cholesky_inverse", lambda x, b: (torch.cholesky_inverse(torch.linalg.cholesky(spd(x))), torch.cholesky_solve(b, torch.linalg.cholesky(spd(x)))), (x, b), relative=2048, absolute=2048)


def distances():
    yield Case("cdist", lambda x, y: (torch.cdist(x, y), torch.cdist(x, y, p=1.0), torch.cdist(x, y, p=3.0), torch.cdist(x, y, p=float("inf"))), ((2, 4, 6), (2, 3, 6)), **WIDE)
    yield Case("cdist_self", lambda x: torch.cdist(x, x), ((4, 6),), **WIDE)
    yield Case("pairwise_distance", lambda x, y: (F.pairwise_distance(x, y), F.pairwise_distance(x, y, p=1.0, keepdim=True)), ((4, 6), (4, 6)), **WIDE)
    yield Case("weight_norm", lambda v, g: (torch._weight_norm(v, g, 0), torch._weight_norm(v, g.reshape(1, 3, 1), 1), torch._weight_norm(v, g.sum(), -1)), ((3, 3, 4), (3, 1, 1)), **WIDE)
    yield Case("circular_pad", lambda x: (F.pad(x, (2, 1, 3, 0), mode="circular"), F.pad(x[0], (1, 2), mode="circular")), ((2, 3, 4, 5),), **WIDE)
    yield Case("unfold", lambda x: (F.unfold(x, 3, padding=1, stride=2), F.unfold(x, (2, 3), dilation=(2, 1))), ((2, 3, 6, 7),), **WIDE)
    yield Case("fold", lambda x: F.fold(x, (6, 7), 3, padding=1, stride=2), ((2, 27, 12),), **WIDE)
    yield Case("fold_dilated", lambda x: F.fold(x, (6, 7), (2, 3), dilation=(2, 1)), ((2, 12, 20),), **WIDE)
    for mode in ("sum", "mean", "max"):
        yield Case(f"embedding_bag_{mode}", lambda w, i, m=mode: (F.embedding_bag(i, w, mode=m), F.embedding_bag(i, w, mode=m, padding_idx=2)), ((5, 4), ints(5, 3, 6)), **WIDE)
    yield Case("embedding_bag_weighted", lambda w, s, i: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), ((5, 4), (3, 6), ints(5, 3, 6)), **WIDE)
    yield Case("masked_scatter", lambda x, s, m: (x.masked_scatter(m, s), x.masked_scatter(m[:, :1].expand(3, 4), s)), ((3, 4), (5, 4), bools(3, 4)), **WIDE)
    yield Case("truths", lambda x: (torch._is_all_true(x > -9), torch._is_any_true(x > 9)), ((3, 4),), trained=())
    yield Case("item_as_value", lambda x, m: x * m.sum().item(), ((3, 4), fixed(1.5, 2.0)), trained=(0,), **WIDE)


def loops():
    yield Case("scan", lambda x, w: scan(lambda c, a: ((n := torch.tanh(c @ w + a)), n * 2), x[0], x[1:], dim=0), ((5, 2, 4), (4, 4)), trained=(), **WIDE)
    yield Case("map", lambda x, w: each(lambda a: torch.tanh(a @ w), x), ((5, 2, 4), (4, 4)), trained=(), **WIDE)

    def mask(lengths):
        f = lambda b, q, k: (q >= k) & (k < lengths[b])
        for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
            f = torch.vmap(f, in_dims=dims)
        return f(torch.arange(3), torch.arange(4), torch.arange(5))

    yield Case("vmap_mask", mask, (fixed(2, 5, 3),), trained=())


def cases():
    for family in (complex_numbers, transforms, sampling, systems, distances, loops):
        yield from family()
