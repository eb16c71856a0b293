"""Recurrent layers, branches and loops."""

import torch

from . import Case, fixed

WIDE = dict(relative=64, absolute=64)
T, B, I, H = 5, 2, 3, 4


def weights(gates, layers=1, directions=1, biased=True):
    shapes = []
    for n in range(layers * directions):
        size = I if n < directions else directions * H
        shapes += [(gates * H, size), (gates * H, H)] + [(gates * H,)] * 2 * biased
    return tuple(shapes)


def layer(op, states, layers=1, bidirectional=False, batch_first=False, biased=True):
    def function(x, *rest):
        first = rest[0] if states == 1 else rest[:states]
        return op(x, first, rest[states:], biased, layers, 0.0, False, bidirectional, batch_first)

    return function


def recurrent():
    x, h = (T, B, I), (1, B, H)
    for name, op, gates in (("rnn_tanh", torch.rnn_tanh, 1), ("rnn_relu", torch.rnn_relu, 1), ("gru", torch.gru, 3), ("lstm", torch.lstm, 4)):
        states = 2 if name == "lstm" else 1
        everything = tuple(range(2 + states + 16))
        yield Case(name, layer(op, states), (x, *[h] * states, *weights(gates)), trained=everything, **WIDE)
        yield Case(f"{name}_first", layer(op, states, batch_first=True, biased=False), ((B, T, I), *[h] * states, *weights(gates, biased=False)),
                   trained=everything, **WIDE)
        yield Case(f"{name}_deep", layer(op, states, layers=2, bidirectional=True), (x, *[(4, B, H)] * states, *weights(gates, 2, 2)), trained=everything, **WIDE)
    x, h = (B, I), (B, H)
    yield Case("rnn_cell", torch.rnn_tanh_cell, (x, h, *weights(1)), trained=range(6), **WIDE)
    yield Case("gru_cell", torch.gru_cell, (x, h, *weights(3)), trained=range(6), **WIDE)
    yield Case("lstm_cell", lambda x, h, c, *w: torch.lstm_cell(x, (h, c), *w), (x, h, h, *weights(4)), trained=range(7), **WIDE)


def branch(x, y):
    return torch.cond(x.sum() > 0, lambda x, y: (x * y, x + 1), lambda x, y: (x - y, x.sin()), (x, y))


def doubled(x):
    def body(i, x):
        return i + 1, x * 1.5 + i

    return torch.ops.higher_order.while_loop(lambda i, x: i < 7, body, (torch.tensor(0), x), ())[1]


def cases():
    yield from recurrent()
    yield Case("histc", lambda x: (torch.histc(x, 4, -1, 1), torch.histc(x.float().round(), 3, 0, 2)), (fixed(-1.0, -0.6, -0.5, 0.2, 1.0, 1.1, 0.99, -3.0),), trained=())
    yield Case("cond", branch, ((3, 4), (3, 4)))
    yield Case("cond_other", lambda x, y: branch(x - 9, y), ((3, 4), (3, 4)))
    yield Case("while_loop", doubled, ((3, 4),), trained=())
