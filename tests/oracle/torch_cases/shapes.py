"""Views, changes in place, creation."""

import torch
import torch.nn.functional as F

from . import Case, bools, ints

A = (4, 6)


def in_place(function):
    """A function that changes a copy of its argument."""
    return lambda x, *rest: function((x * 1), *rest)


def slice_assign(x, y):
    x[:, 1:3] = y
    x[0] = 5
    x[1:, 0] += 2
    return x


def stepped_assign(x, y):
    x[::2, 1::3] = y
    return x


def through_views(x):
    y = x.view(2, 12)
    z = y.t()
    z.mul_(2)
    x[0, 0] = 7
    return x, y + 0, z.sum()


def chained(x):
    a, b = x.chunk(2, dim=1)
    a.add_(b)
    b.relu_()
    return x, a * 2


def base_after_view(x):
    row = x[1]
    x.add_(1)
    return row * 3


def expanded_read(x):
    e = x[:, :1].expand(4, 3)
    x.mul_(2)
    return e + 1


def reshape_then_write(x):
    y = x.reshape(-1)
    y[3] = 9
    return y


def copy_into(x, y):
    x.copy_(y)
    x.select(0, 1).fill_(3)
    x.narrow(1, 0, 2).zero_()
    return x


def cases():
    yield Case("view", lambda x: (x.view(2, 12), x.view(-1), x.view(2, -1, 3)), (A,))
    yield Case("reshape", lambda x: (x.t().reshape(2, 12), x.reshape(3, -1)), (A,))
    yield Case("flatten", lambda x: (x.flatten(), x.flatten(1), x.unflatten(1, (2, 3)), x.unflatten(-1, (-1, 2))), (A,))
    yield Case("permute", lambda x: (x.permute(2, 0, 1), x.transpose(0, 2), x.movedim(0, -1), x.mT), ((2, 3, 4),))
    yield Case("transposes", lambda x: (x.t(), x.T, x.swapaxes(0, 1), x.movedim((0, 1), (1, 0))), (A,))
    yield Case("squeeze", lambda x: (x.squeeze(), x.squeeze(0), x.squeeze((0, 2)), x.unsqueeze(1), x.unsqueeze(-1)), ((1, 3, 1),))
    yield Case("expand", lambda x: (x.expand(4, 3), x.expand(2, -1, 3), x.broadcast_to(4, 3)), ((1, 3),), trained=(0,))
    yield Case("slices", lambda x: (x[1], x[-1], x[1:3], x[:, ::2], x[..., 1:], x[None, 0], x[1:2, 3:5]), (A,))
    yield Case("narrow", lambda x: (x.narrow(0, 1, 2), x.select(1, -2)), (A,))
    yield Case("splits", lambda x: (*x.split(2), *x.split([1, 5], 1), *x.chunk(4, 1), *x.unbind(0), *x.tensor_split(4, 1)), (A,))
    yield Case("tensor_split_at", lambda x: x.tensor_split((1, 4), 1), (A,))
    yield Case("cat", lambda x, y: (torch.cat([x, y]), torch.cat([x, x], -1), torch.stack([x, x * 2], 1)), (A, (2, 6)))
    yield Case("cat_mixed", lambda x, y: torch.cat([x, y]), (A, ints(9, 2, 6)), trained=())
    yield Case("stacks", lambda x: (torch.hstack([x, x]), torch.vstack([x, x])), (A,))
    yield Case("flip_roll", lambda x: (x.flip(0), x.flip((0, 1)), x.roll(2), x.roll((1, -2), (0, 1))), (A,))
    yield Case("repeat", lambda x: (x.repeat(2, 3), x.repeat(2, 1, 1), x.tile(2), x.repeat_interleave(3, dim=1),
                                    x.repeat_interleave(2)), (A,))
    yield Case("unfold", lambda x: x.unfold(1, 3, 2), (A,))
    yield Case("diagonals", lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-2)), (A,))
    yield Case("diag_embed", lambda x: (torch.diag_embed(x), torch.diag(x[0])), (A,))
    yield Case("triangles", lambda x: (x.tril(), x.triu(1), x.tril(-1), x.triu(-2)), (A,))
    yield Case("meshgrid", lambda x, y: (*torch.meshgrid(x, y, indexing="ij"), *torch.meshgrid(x, y, indexing="xy")), ((3,), (4,)))
    yield Case("pad", lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, 0, 2, -1), value=3), F.pad(x, (-1, -1))), (A,))
    for mode in ("reflect", "replicate"):
        yield Case(f"pad_{mode}", lambda x, m=mode: (F.pad(x, (1, 2, 2, 1), mode=m), F.pad(x[0], (2, 0), mode=m)), ((1, 2, 4, 6),))
    yield Case("pixel_shuffle", lambda x: (F.pixel_shuffle(x, 2), F.channel_shuffle(x, 4)), ((2, 8, 3, 3),))
    yield Case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), ((2, 3, 4, 6),))

    yield Case("arange", lambda x: (x + torch.arange(6), torch.arange(1, 7, 2) * x[0, 0], torch.arange(0, 1, 0.25) + x[0, 0],
                                    torch.arange(6, 0, -1, dtype=torch.float32) + x), (A,))
    yield Case("constants", lambda x: (x + torch.zeros(6), x * torch.ones(4, 1), x + torch.full((6,), 0.5),
                                       x.new_ones(2) + x[:2, 0], x.new_zeros(6) + x, x.new_full((6,), 3) + x,
                                       torch.zeros_like(x) + x, torch.ones_like(x) * x, torch.full_like(x, 2) * x,
                                       torch.eye(6)[:4] + x, torch.linspace(0, 1, 6) + x), (A,))
    yield Case("tril_indices", lambda x: torch.tril_indices(3, 4) + x.long()[:2, :1], (A,), trained=())
    yield Case("empty_filled", lambda x: x.new_empty(4, 6).fill_(2) + x, (A,))
    yield Case("one_hot", lambda x: F.one_hot(x, 7), (ints(7, 5),), trained=())
    yield Case("tensor_constant", lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]), (A,))

    yield Case("in_place_arithmetic", in_place(lambda x, y: x.add_(y).mul_(2).sub_(1).div_(3).clamp_(-1, 1)), (A, A))
    yield Case("in_place_activations", in_place(lambda x: F.leaky_relu(F.silu(x, inplace=True), inplace=True).add_(1)), (A,), trained=())
    yield Case("in_place_type", lambda x, y: (x * 1).add_(y), (A, ints(5, 6)), trained=(0,))
    yield Case("slice_assign", in_place(slice_assign), (A, (4, 2)))
    yield Case("stepped_assign", in_place(stepped_assign), (A, (2, 2)))
    yield Case("through_views", in_place(through_views), (A,))
    yield Case("chained_views", in_place(chained), (A,), trained=())
    yield Case("base_after_view", in_place(base_after_view), (A,))
    yield Case("expanded_read", in_place(expanded_read), (A,))
    yield Case("reshape_then_write", in_place(reshape_then_write), (A,))
    yield Case("copy_into", in_place(copy_into), (A, A))
    yield Case("masked_fill_in_place", in_place(lambda x, m: x.masked_fill_(m, 0.5)), (A, bools(*A)))
    yield Case("detach", lambda x: x * x.detach() + (x**2).detach(), (A,))
    yield Case("no_grad", lambda x: stopped(x) * x, (A,))
    yield Case("sizes", lambda x: x.view(x.shape[0] // 2, -1) / x.numel() + x.size(1), (A,))
    yield Case("clone_contiguous", lambda x: x.t().contiguous().clone() + x.t(), (A,))
    yield Case("type_as", lambda x, y: y.type_as(x) + x.float() + y.to(x), (A, ints(5, 6)), trained=(0,))
    yield Case("select_scatter", lambda x, y: (torch.select_scatter(x, y, 0, 1), torch.slice_scatter(x, y[None], 0, 2, 3)), (A, (6,)))


def stopped(x):
    with torch.no_grad():
        return x * 3 + 1
