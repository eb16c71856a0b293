"""The package without frameworks: figures, questions, errors, interrupts."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import altiplano

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "models" / "gpt-small-demo.mlir"
GPT = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}


class Package(unittest.TestCase):
    def test_import_is_quick_and_brings_nothing_but_the_standard_library(self):
        code = (
            "import sys; before = set(sys.modules); import altiplano; "
            "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
            "print(sorted(new - set(sys.stdlib_module_names)))"
        )
        self.assertEqual(subprocess.check_output([sys.executable, "-c", code], text=True).strip(), "['altiplano']")
        # Seconds of the processor, which do not count how long other processes had it.
        seconds = []
        for _ in range(5):
            before = os.times()
            subprocess.check_call([sys.executable, "-c", "import altiplano"])
            after = os.times()
            seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
        self.assertLess(min(seconds), 0.2)

    def test_a_plan_has_figures_and_answers_questions(self):
        plan = altiplano.plan(DEMO, cluster="local:4", pp=2)
        self.assertEqual(plan.degrees["pp"], 2)
        self.assertEqual(len(plan.stages), 2)
        self.assertTrue(plan.fits)
        self.assertGreater(plan.step_seconds, plan.lower_bound_seconds)
        self.assertIn("attention", plan.why(op="attention"))
        self.assertIn("stage0", plan.why(stage=0))
        other = plan.why_not(tp=4)
        self.assertEqual(other.plan.degrees["pp"], 1)
        self.assertEqual(other.seconds, (plan.step_seconds, other.plan.step_seconds))
        self.assertEqual(plan.compare(other.plan)["plans"][1]["step_time_s"], other.plan.step_seconds)
        self.assertIn("stage", str(plan.simulate()))
        self.assertIn("<html", plan.to_html()[:200].lower())
        self.assertIn("iframe", plan._repr_html_())
        self.assertIn("altiplano plan", plan.to_dict()["made_by"]["command"])

    def test_a_saved_plan_is_the_same_and_the_command_line_reads_it(self):
        plan = altiplano.plan(str(DEMO), cluster="local:4", tp=2)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            plan.save(file)
            of_search = {"plan", "notes", "stopped"}
            figures = {name: value for name, value in plan.figures.items() if name not in of_search}
            self.assertEqual({**altiplano.load(file).figures, **{"plan": None}}, {**figures, "plan": None})
            said = subprocess.check_output([altiplano._process.binary(), "inspect", str(file)], text=True)
            self.assertEqual(said.strip(), plan.report().strip())

    def test_configs_as_dicts_and_scaling(self):
        plan = altiplano.plan(GPT, cluster="dgx-a100:1", seq=64, global_batch=64)
        self.assertEqual(plan.global_batch, 64)
        report = altiplano.scale(GPT, cluster="dgx-a100:1", seq=64, global_batch=64, nodes=[1, 2])
        self.assertEqual([row["nodes"] for row in report["rows"]], [1, 2])
        points = altiplano.frontier(GPT, cluster="dgx-a100:1", seq=64, global_batch=64)
        self.assertEqual(sorted(p.step_seconds for p in points), [p.step_seconds for p in points])

    def test_trials_are_packed(self):
        wide = {**GPT, "n_embd": 2 * GPT["n_embd"]}
        report = altiplano.trials(GPT, wide, count=[5, 2], steps=10, cluster="dgx-a100:1", seq=64, global_batch=64)
        self.assertEqual([model["count"] for model in report["models"]], [5, 2])
        self.assertEqual([trial["model"] for trial in report["trials"]].count(1), 2)
        self.assertIn("all are done after", str(report))
        alone = altiplano.trials(DEMO, count=3, cluster="local:2")
        self.assertEqual(len(alone["trials"]), 3)
        with self.assertRaises(altiplano.OptionError):
            altiplano.trials(DEMO, count=[1, 2], cluster="local:2")

    def test_a_plan_is_verified(self):
        plan = altiplano.plan(DEMO, cluster="local:2", tp=2)
        self.assertIn("agrees", altiplano.verify(plan))


class Judging(unittest.TestCase):
    def test_judgements_are_figures_or_reasons(self):
        with altiplano.Oracle(GPT, "dgx-a100:1", seq=64, global_batch=64) as oracle:
            judged = oracle.judge(tp=2, pp=2, micro_batch_size=4, zero=1)
            self.assertTrue(judged)
            self.assertEqual((judged.degrees["pp"], judged.num_microbatches, judged.zero), (2, 8, 1))
            refused = oracle.judge(tp=3)
            self.assertFalse(refused)
            self.assertIn("--tp 3", refused.reason)
            self.assertFalse(refused.is_predicted)
            with self.assertRaises(altiplano.OptionError) as caught:
                oracle.judge(tensors=3)
            self.assertEqual(caught.exception.place, "tensors")
            self.assertGreaterEqual(judged.step_seconds, oracle.plan().step_seconds)
        with self.assertRaises(ValueError):
            oracle.judge(tp=2)

    def test_what_does_not_fit_is_predicted_too(self):
        large = GPT | {"n_embd": 8192, "n_layer": 40, "n_head": 64}
        judged = altiplano.judge(large, cluster="dgx-a100:1", seq=64, global_batch=8, precision="bf16")
        self.assertFalse(judged)
        self.assertGreater(judged.peak_bytes, judged.stages[0]["limit_bytes"])
        self.assertIn("no plan fits in memory", judged.reason)

    def test_random_questions_from_several_threads(self):
        random.seed(5)
        with altiplano.Oracle(GPT, "dgx-a100:2", seq=64, global_batch=64) as oracle:
            questions = [
                {"tp": random.choice([1, 2, 4, 8]), "pp": random.choice([1, 2, 4]), "zero": random.randrange(4)}
                for _ in range(40)
            ]
            alone = [oracle.judge(**question).figures for question in questions]
            together = [None] * len(questions)

            def ask(part):
                for i in range(part, len(questions), 4):
                    together[i] = oracle.judge(**questions[i]).figures

            threads = [threading.Thread(target=ask, args=(part,)) for part in range(4)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            self.assertEqual(alone, together)


class Failures(unittest.TestCase):
    def test_what_does_not_fit_has_remedies(self):
        large = GPT | {"n_embd": 8192, "n_layer": 2, "n_head": 64}
        with self.assertRaises(altiplano.DoesNotFit) as caught:
            altiplano.plan(large, cluster="local:2", seq=64, global_batch=2)
        self.assertTrue(caught.exception.remedies)
        self.assertTrue(caught.exception.shortage["tensors"])
        self.assertEqual(caught.exception.data["exit_code"], 1)

    def test_errors_name_their_place(self):
        for function, kind, place in [
            (lambda: altiplano.plan("none.mlir"), altiplano.FileError, "none.mlir"),
            (lambda: altiplano.plan(DEMO, cluster="dgx-z9:1"), altiplano.ClusterError, None),
            (lambda: altiplano.plan(DEMO, cluster="local:4", tp="many"), altiplano.OptionError, "tp"),
            (lambda: altiplano.plan(DEMO, cluster="local:4", tp=3), altiplano.OptionError, None),
            (lambda: altiplano.plan(DEMO, (1,)), altiplano.OptionError, "example_inputs"),
            (lambda: altiplano.plan(3), altiplano.ModelError, "model"),
            (lambda: altiplano.plan(len), altiplano.ModelError, "example_inputs"),
            (lambda: altiplano.load(DEMO), altiplano.ModelError, str(DEMO)),
        ]:
            with self.assertRaises(kind) as caught:
                function()
            if place:
                self.assertEqual(caught.exception.place, place)

    def test_values_that_json_has_not_are_refused_and_do_not_hang(self):
        for value in (float("nan"), object(), [1, object()], "\udc80", ["x" * (2 << 20)]):
            with self.assertRaises(altiplano.OptionError) as caught:
                altiplano.plan(DEMO, cluster="local:2", freeze=value)
            self.assertEqual(caught.exception.place, "freeze")
            self.assertTrue(caught.exception.remedies)

    def test_paths_and_numbers_of_numpy_are_values(self):
        class Number:
            ndim = 0

            def item(self):
                return 2

        plan = altiplano.plan(DEMO, cluster="local:2", tp=Number())
        self.assertEqual(plan.num_devices, 2)
        with tempfile.TemporaryDirectory() as folder:
            plan = altiplano.plan(DEMO, cluster="local:2", output=Path(folder) / "plan.json")
            self.assertEqual(altiplano.load(Path(folder) / "plan.json").step_seconds, plan.step_seconds)

    def test_options_are_named_as_arguments(self):
        with self.assertRaises(altiplano.OptionError) as caught:
            altiplano.plan(DEMO, cluster="local:2", global_batch=0)
        self.assertEqual(caught.exception.place, "global_batch")

    def test_unknown_stacks_are_not_implemented(self):
        plan = altiplano.plan(DEMO, cluster="local:2", tp=2)
        with self.assertRaises(NotImplementedError):
            plan.export("punchcards")

    def test_a_program_that_ends_is_an_error_and_the_next_question_starts_another(self):
        altiplano.plan(DEMO, cluster="local:2", tp=2)
        altiplano._process.shared()._child.kill()
        with self.assertRaises(altiplano.ProcessError):
            altiplano._process._shared.ask("ping", {})
        self.assertTrue(altiplano.plan(DEMO, cluster="local:2", tp=2).fits)

    @unittest.skipUnless(os.name == "posix", "signals of POSIX")
    def test_ctrl_c_ends_a_search_with_its_best_plan(self):
        large = GPT | {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257, "n_positions": 1024}
        options = {"seq": 1024, "global_batch": 512, "precision": "bf16", "nodes": [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]}
        altiplano.plan(DEMO, cluster="local:2", tp=2)
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.perf_counter()
        try:
            fields = altiplano._process.ask(
                "scale", {"model": str(self.config(large)), "cluster": "dgx-a100:1", **options, "nodes": "1,2,3,4,5,6,7,8,12,16"}
            )
        except altiplano.Error:
            fields = None
        finally:
            timer.cancel()
        self.assertLess(time.perf_counter() - start, 120)
        self.assertTrue(fields is None or fields["rows"])

    def config(self, config):
        folder = tempfile.mkdtemp()
        self.addCleanup(lambda: __import__("shutil").rmtree(folder))
        file = Path(folder) / "gpt.json"
        file.write_text(json.dumps(config))
        return file


if __name__ == "__main__":
    unittest.main()
