"""Lookups and scatters."""

import torch
import torch.nn.functional as F

from . import Case, bools, fixed, ints

A = (4, 5, 6)


def put(x, *indices_and_value):
    *indices, value = indices_and_value
    x = x * 1
    x[tuple(indices)] = value
    return x


def cases():
    yield Case("embedding", F.embedding, (ints(9, 3, 4), (9, 5)))
    yield Case("embedding_padding", lambda i, w: F.embedding(i, w, padding_idx=2), (ints(5, 3, 8), (5, 4)))
    yield Case("index_one", lambda x, i: (x[i], x[:, i], x[..., i]), (A, ints(4, 3)))
    yield Case("index_matrix", lambda x, i: (x[i], x[:, :, i]), (A, ints(4, 3, 2)))
    yield Case("index_negative", lambda x: x[torch.tensor([-1, 0, -3])], (A,))
    yield Case("index_two", lambda x, i, j: (x[i, j], x[i, :, j], x[:, i, j]), (A, ints(4, 3), ints(4, 3)))
    yield Case("index_broadcast", lambda x, i, j: x[i[:, None], j], (A, ints(4, 3), ints(5, 2)))
    yield Case("index_three", lambda x, i: x[i, i, i], (A, ints(4, 3)))
    yield Case("index_arange", lambda x, j: x[torch.arange(4), j], (A, ints(5, 4)))
    yield Case("index_arange_apart", lambda x, j: x[torch.arange(4), :, j], (A, ints(6, 4)))
    yield Case("index_grid", lambda x: x[torch.arange(4)[:, None], torch.arange(5)[None, :]], (A,))
    yield Case("index_grid_turned", lambda x: x[torch.arange(4)[None, :], torch.arange(5)[:, None]], (A,))
    yield Case("index_grid_apart", lambda x: x[torch.arange(4)[:, None, None], :, torch.arange(6)], (A,))
    yield Case("index_steps", lambda x: x[:, torch.tensor([1, 3])], (A,))
    yield Case("index_constant_mask", lambda x: x[:, torch.tensor([True, False, True, True, False])], (A,))
    yield Case("gather", lambda x, i: torch.gather(x, 1, i), (A, ints(5, 4, 3, 6)))
    yield Case("gather_short", lambda x, i: torch.gather(x, 2, i), (A, ints(6, 2, 3, 4)))
    yield Case("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), (A, ints(5, 4, 2, 1)))
    yield Case("index_select", lambda x, i: (x.index_select(0, i), x.index_select(2, i)), (A, ints(4, 3)))
    yield Case("take", lambda x, i: x.take(i), (A, ints(120, 7)))
    yield Case("put_one", put, (A, fixed(3, 1), (2, 5, 6)))
    yield Case("put_two", put, (A, fixed(3, 1), fixed(0, 4), (2, 6)))
    yield Case("put_number", lambda x, i: put(x, i, 2.0), (A, fixed(3, 1)))
    yield Case("put_mask", lambda x, m: put(x, m, 2.0), (A, bools(*A)))
    yield Case("put_mask_rows", lambda x, m: put(x, m, 2.0), (A, bools(4, 5)))
    yield Case("put_arange", lambda x, j, v: put(x, torch.arange(4), j, v), (A, ints(5, 4), (4, 6)))
    yield Case("index_put_accumulate", lambda x, i, v: x.index_put((i,), v, accumulate=True), (A, ints(4, 7), (7, 5, 6)))
    yield Case("scatter", lambda x, i, s: x.scatter(1, i, s), (A, lambda g: torch.rand(4, 5, 6, generator=g).argsort(1)[:, :2], (4, 2, 6)))
    yield Case("scatter_short", lambda x, i, s: x.scatter(0, i, s), ((4, 5), fixed([0, 1, 2], [3, 0, 1]), (3, 4)), trained=())
    yield Case("scatter_number", lambda x, i: x.scatter(2, i, 7.0), (A, ints(6, 4, 5, 2)))
    yield Case("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), (A, ints(5, 4, 7, 6), (4, 7, 6)))
    for how in ("sum", "amax", "amin", "prod", "mean"):
        # PyTorch spreads the gradient of equal extrema, which random numbers do not have.
        yield Case(f"scatter_reduce_{how}", lambda x, i, s, h=how: x.scatter_reduce(1, i, s, h), ((3, 4), ints(4, 3, 6), (3, 6)), relative=64, absolute=32)
        yield Case(f"scatter_reduce_{how}_alone", lambda x, i, s, h=how: x.scatter_reduce(1, i, s, h, include_self=False), ((3, 4), ints(4, 3, 2), (3, 2)), relative=64, absolute=32)
    yield Case("index_add", lambda x, i, s: x.index_add(1, i, s, alpha=2), (A, ints(5, 7), (4, 7, 6)))
    yield Case("index_copy", lambda x, i, s: x.index_copy(0, i, s), (A, fixed(2, 0), (2, 5, 6)))
    yield Case("index_fill", lambda x, i: x.index_fill(1, i, 4.0), (A, fixed(2, 0)))
