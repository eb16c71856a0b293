"""Plans a PyTorch module, and asks why."""

import torch
from torch import nn

import altiplano


class Classifier(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, width), nn.Linear(width, 64), nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x + self.down(torch.relu(self.up(x))))


plan = altiplano.plan(
    Classifier(), (torch.zeros(16, 64),), cluster="dgx-a100:1", loss="cross-entropy", global_batch=4096, prefer="fastest"
)
print(plan)
print(plan.why("up.weight"))
