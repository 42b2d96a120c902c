"""Train a module of your own with the step engine: any nn.Module, any loss, one program a step.

    python examples/own_model.py [STEPS]

A small recurrent network learns to repeat a sequence after a pause. On a CUDA card each step is one captured graph in
bf16; on the CPU the same program runs call by call.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.engine import TrainStep
from ridgeline.optim import OptimizerConfig

SYMBOLS, LENGTH = 8, 6


class Repeater(nn.Module):
    """Embedding, GRU, linear head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS + 1, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, SYMBOLS)

    def forward(self, symbols_BT: Tensor) -> Tensor:
        """Logits (B, T, SYMBOLS)."""
        return self.head(self.memory(self.embed(symbols_BT))[0])


def batch(size: int) -> dict[str, Tensor]:
    """Sequences, then as many blanks, during which they are to be repeated."""
    said = torch.randint(SYMBOLS, (size, LENGTH))
    return {"symbols": torch.cat([said, torch.full_like(said, SYMBOLS)], 1), "wanted": said}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the repetition, in nats."""
    logits = model(batch["symbols"])[:, LENGTH:]
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["wanted"].flatten())


def main() -> None:
    """Train and print the loss now and then."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    cuda = torch.cuda.is_available()
    torch.manual_seed(0)
    model = Repeater().to("cuda" if cuda else "cpu")
    step = TrainStep(
        model,
        loss,
        OptimizerConfig(lr=5e-3, warmup=20, weight_decay=0.0),
        steps=steps,
        precision="bf16" if cuda else "fp32",
    )
    for done in range(1, steps + 1):
        step(batch(128))
        if done % max(1, steps // 6) == 0:
            step.check()
            print(f"step {done}  loss {step.metrics(done - 1)[-1].loss:.3f}")


if __name__ == "__main__":
    main()
