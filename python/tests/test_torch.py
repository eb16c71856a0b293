"""Modules of PyTorch: one call plans them, and what cannot be traced says why."""

import unittest

import altiplano

try:
    import torch
    from torch import nn
except ImportError:
    raise unittest.SkipTest("torch is not installed")


class Mlp(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Patches(nn.Module):
    """A vision transformer as timm builds it."""

    def __init__(self, hidden=64, depth=2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, hidden, 8, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, hidden))
        layer = lambda: nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(depth))
        self.head = nn.Linear(hidden, 10)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Conv2d(inputs, outputs, 1, 2, bias=False)

    def forward(self, x):
        return torch.relu(self.two(self.one(x)) + self.short(x))


class Planning(unittest.TestCase):
    def plans(self, module, inputs, **options):
        plan = altiplano.plan(module, inputs, cluster="dgx-a100:1", global_batch=64, prefer="fastest", **options)
        self.assertTrue(plan.fits)
        self.assertEqual(plan.global_batch, 64)
        self.assertEqual(plan.model, type(module).__name__)
        return plan

    def test_a_perceptron(self):
        plan = self.plans(Mlp(), (torch.zeros(8, 16),), loss="mse")
        self.assertIn("up.weight", plan.why("up.weight"))

    def test_inputs_by_name(self):
        self.plans(Mlp(), {"x": torch.zeros(8, 16)}, loss="mse")

    def test_a_vision_transformer(self):
        self.plans(Patches(), (torch.zeros(8, 3, 32, 32),), loss="cross-entropy")

    def test_a_residual_network(self):
        module = nn.Sequential(Block(3, 16), Block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        self.plans(module, (torch.zeros(8, 3, 32, 32),), loss="cross-entropy", allow_microbatch_semantics=True)

    def test_an_exported_program(self):
        program = torch.export.export(Mlp(), (torch.zeros(8, 16),))
        self.assertTrue(altiplano.plan(program, cluster="local:2", loss="mse").fits)

    def test_language_models_of_transformers(self):
        try:
            import transformers
        except ImportError:
            self.skipTest("transformers is not installed")
        sizes = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
        gpt2 = transformers.GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4)
        llama = transformers.LlamaConfig(**sizes, intermediate_size=128, max_position_embeddings=32)
        for config, of in ((gpt2, transformers.GPT2LMHeadModel), (llama, transformers.LlamaForCausalLM)):
            plan = altiplano.plan(config, cluster="dgx-a100:1", seq=32, global_batch=64)
            self.assertEqual(plan.global_batch, 64)
            module = of(config)
            module.config.use_cache = False
            tokens = torch.zeros(4, 32, dtype=torch.long)
            self.plans(module, {"input_ids": tokens, "labels": tokens}, loss="loss")


class Refusals(unittest.TestCase):
    def refused(self, place, *arguments, **options):
        with self.assertRaises(altiplano.ModelError) as caught:
            altiplano.plan(*arguments, cluster="local:2", **options)
        self.assertTrue(caught.exception.remedies)
        self.assertIn(place, caught.exception.place)

    def test_each_is_one_exception_with_place_and_remedy(self):
        self.refused("example_inputs", Mlp())
        self.refused("example_inputs[0]", Mlp(), (torch.zeros(1, 16),))
        self.refused("example_inputs[0]", Mlp(), ("text",))
        self.refused("test_torch.py", Mlp(), (torch.zeros(8, 17),))
        self.refused("model", Mlp().to("meta"), (torch.zeros(8, 16),))
        self.refused("example_inputs[0]", Mlp(), (torch.zeros(0, 16),))
        self.refused("example_inputs[0]", Mlp(), (torch.zeros(8, 16, device="meta"),))
        self.refused("example_inputs", Mlp(), (3.0,))
        self.refused("model", Mlp, (torch.zeros(8, 16),))
        self.refused("model", lambda x: x, (torch.zeros(8, 16),))
        self.refused("model", Mlp(), {"y": torch.zeros(8, 16)}, loss="mse")
        self.refused("model", {"model_type": "unheard of"})

    def test_one_sample_will_do_if_the_batch_is_named(self):
        self.assertTrue(altiplano.plan(Mlp(), (torch.zeros(1, 16),), cluster="local:2", loss="mse", batch_dim={"x": 0}).fits)

    def test_unsupported_ops_are_named_by_the_line_of_the_module(self):
        class Svd(Mlp):
            def forward(self, x):
                return torch.linalg.svd(self.up(x))[1]

        self.refused("test_torch.py", Svd(), (torch.zeros(8, 16),), loss="mse")
        with self.assertRaises(altiplano.ModelError) as caught:
            altiplano.plan(Svd(), (torch.zeros(8, 16),), cluster="local:2", loss="mse")
        self.assertIn("linalg_svd", caught.exception.message)
        self.assertNotIn("altiplano-", caught.exception.message)

    def test_branches_on_values(self):
        class Branch(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        self.refused("", Branch(), (torch.zeros(8, 16),))

    def test_a_module_without_loss_is_told_so(self):
        with self.assertRaises(altiplano.ModelError) as caught:
            altiplano.plan(Mlp(), (torch.zeros(8, 16),), cluster="local:2")
        self.assertIn("--loss", caught.exception.message)


if __name__ == "__main__":
    unittest.main()
