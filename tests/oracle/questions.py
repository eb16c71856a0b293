"""Random questions to one resident process, good and bad: it must neither end nor grow, and answer as the command line does.

    ALTIPLANO_BINARY=target/release/altiplano PYTHONPATH=python python tests/oracle/questions.py [QUESTIONS] [SAMPLED] [SEED]

Asks QUESTIONS (default 2000) about small models, of which SAMPLED (default 20) of each kind go to the command line too. Prints what
was asked, how it was answered, and the memory of the process. Fails if an answer differs, if a bad question has no failure with a
kind, or if the process grows by more than a tenth after the first third of 10,000 questions or more; fewer do not fill what it keeps.
"""

import collections
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import altiplano
from altiplano import _process

DEMO = Path(__file__).resolve().parents[2] / "examples" / "models" / "gpt-small-demo.mlir"
GPT = {"model_type": "gpt2", "vocab_size": 509, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}
EXPERTS = LLAMA | {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
LARGE = GPT | {"n_embd": 8192, "n_head": 64, "n_layer": 24}
#: Shares of the kinds of questions.
KINDS = {"judge": 0.93, "bad": 0.05, "why": 0.01, "why_not": 0.005, "plan": 0.005}
BAD = (
    ("judge", {"tensors": 3}),
    ("judge", {"tp": "many"}),
    ("judge", {"tp": -1}),
    ("judge", {"tp": 0}),
    ("judge", {"tp": 1 << 40}),
    ("judge", {"tp": [1, [2]]}),
    ("judge", {"tp": {"a": {}}}),
    ("judge", {"recompute": "some"}),
    ("judge", {"precision": "f8"}),
    ("judge", {"cluster": "dgx-z9:1"}),
    ("judge", {"cluster": "dgx-a100:0"}),
    ("judge", {"cluster": "/dev/null"}),
    ("judge", {"global_batch": 0}),
    ("judge", {"zero": 9}),
    ("judge", {"model": "model:999999"}),
    ("judge", {"model": "none.json"}),
    ("judge", {"pin": "x"}),
    ("judge", {"": 1}),
    ("plan", {"tp": 7}),
    ("plan", {"goal": 5}),
    ("why", {"plan": "plan:0"}),
    ("why_not", {"plan": "plan:999999", "tp": 2}),
    ("divine", {}),
)
#: Lines that are no questions. Each is answered by an error without an id, or with the id that it has.
LINES = (b"{", b"[]", b"null", b'{"id": {}, "method": "ping"}', b'{"id": 1}', b'{"method": 3, "id": 2}', b"\xff\xfe", b'{"id": "x", "method": "judge", "params": 3}')


class Model:
    """A model in a file and in the process, with a plan of it."""

    def __init__(self, file, read, plan):
        self.file, self.read, self.planning = str(file), read, plan
        self.handle = _process.ask("load_model", {"model": self.file, **read})["model"]


class Asker:
    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        write = lambda name, config: (folder / name).write_text(json.dumps(config)) and folder / name
        options = {"seq": 64}
        self.models = [
            Model(write("gpt.json", GPT), options, {"cluster": "dgx-a100:1", "global_batch": 48}),
            Model(write("llama.json", LLAMA), options | {"precision": "bf16"}, {"cluster": "p3.16xlarge:2", "global_batch": 64}),
            Model(write("experts.json", EXPERTS), options, {"cluster": "dgx-h100:1", "global_batch": 32}),
            Model(write("large.json", LARGE), options, {"cluster": "dgx-a100:1", "global_batch": 16}),
            Model(DEMO, {}, {"cluster": "dgx-a100:1", "global_batch": 64}),
        ]
        # A model whose searches are slow is only judged.
        self.searched = [self.models[0], self.models[1], self.models[4]]
        self.plans = [(model, altiplano.plan(model.file, **model.read, **model.planning)) for model in self.searched[:2]]
        for at, (_, plan) in enumerate(self.plans):
            plan.file = folder / f"plan{at}.json"
            plan.save(plan.file)
        self.differ, self.counts, self.sampled = [], collections.Counter(), collections.Counter()

    def question(self):
        """A question: its kind, method, parameters, and its command line, if it has one."""
        pick = self.random.choice
        kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
        model = pick(self.models)
        degrees = {"tp": pick((1, 1, 2, 2, 4, 8, 3)), "pp": pick((1, 1, 1, 2, 2, 4, 9)), "zero": pick((0, 1, 2, 3))}
        if kind == "judge":
            degrees |= {"micro_batch_size": pick((1, 2, 3, 4)), "recompute": pick(("none", "selective", "full"))}
            options = model.planning | degrees | {"virtual_stages": 1, "target": "megatron"}
            devices = {"dgx-a100:1": 8, "p3.16xlarge:2": 16, "dgx-h100:1": 8}[options["cluster"]]
            options["dp"] = max(1, devices // (degrees["tp"] * degrees["pp"]))
            return kind, "judge", {"model": model.handle, **options}, ["plan", model.file, *words({**model.read, **options}), "--json"]
        if kind == "bad":
            method, wrong = pick(BAD)
            of_model = {"model": model.handle, "cluster": "dgx-a100:1", "remedies": False}
            base = {"judge": {"model": model.handle}, "plan": of_model, "why": {"op": "x"}, "why_not": {"remedies": False}}
            return kind, method, base.get(method, {}) | wrong, None
        if kind == "plan":
            model = pick(self.searched)
            options = model.planning | {name: degrees[name] for name in self.random.sample(sorted(degrees), 1)}
            return kind, "plan", {"model": model.handle, "remedies": False, **options}, ["plan", model.file, *words({**model.read, **options}), "--json"]
        model, plan = pick(self.plans)
        if kind == "why":
            about = pick(({"op": "*"}, {"op": "attention"}, {"stage": 0}, {"stage": 99}, {"op": "nothing like it"}))
            return kind, "why", {"plan": plan._handle, **about}, ["why", str(plan.file), *words(about)]
        options = {name: degrees[name] for name in self.random.sample(sorted(degrees), 1)}
        return kind, "why_not", {"plan": plan._handle, "remedies": False, **options}, ["why-not", str(plan.file), *words(options), "--json"]

    def ask(self, samples):
        kind, method, params, line = self.question()
        try:
            answer, outcome = _process.shared().ask(method, params), "answered"
        except altiplano.ProcessError:
            raise
        except altiplano.Error as error:
            answer, outcome = error, f"{error.kind} failure"
            assert error.kind not in ("error", "internal"), (method, params, error)
            assert error.message and "\n" not in error.message.split(":")[0], error.message
        if method == "judge" and outcome == "answered":
            outcome = "fits" if answer["fits"] else "does not fit" if "step_time_s" in answer else "cannot be"
        assert kind != "judge" or not isinstance(answer, altiplano.Error), (params, answer)
        assert kind != "bad" or outcome not in ("answered", "fits"), (method, params, answer)
        self.counts[kind, outcome] += 1
        if kind == "plan" and outcome == "answered":
            _process.ask("release", {"handle": answer["plan"]})
        # A sample of each outcome, spread over the questions.
        if line and self.sampled[kind, outcome] < samples and self.random.random() < 0.3:
            self.sampled[kind, outcome] += 1
            same, said = agrees(kind, answer, line)
            if same and kind == "judge":
                model = next(model for model in self.models if model.handle == params["model"])
                alone = judged_alone(model, params)
                same, said = alone == answer, f"a fresh process answers {alone}"
            if not same:
                self.differ.append((params, line, said))


def words(options):
    """Options as a command line has them."""
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def judged_alone(model, params):
    """The judgement of a process that has answered nothing else, or its error."""
    load = {"id": 1, "method": "load_model", "params": {"model": model.file, **model.read}}
    judge = {"id": 2, "method": "judge", "params": {**params, "model": "model:1"}}
    with subprocess.Popen([_process.binary(), "serve", "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alone:
        for message in (load, judge):
            alone.stdin.write(json.dumps(message).encode() + b"\n")
            alone.stdin.flush()
            answer = json.loads(alone.stdout.readline())
        alone.stdin.close()
    return answer.get("result", answer.get("error"))


def agrees(kind, answer, line):
    """True if the command line answers alike. Also returns what it says.

    A judged configuration is compared with a plan of the same degrees. That search may also split tokens between products, and deal
    layers out unevenly, so that it may be faster where there are products or stages to split.
    """
    run = subprocess.run([_process.binary(), *line], capture_output=True, text=True)
    if isinstance(answer, altiplano.Error) or kind == "judge" and not answer["fits"]:
        expected = [1, 2] if kind == "judge" else [answer.data["exit_code"]]
        return run.returncode in expected, f"{run.returncode}: {run.stderr}"
    if run.returncode != 0:
        return False, run.stderr
    if kind == "why":
        return run.stdout.strip() == answer["text"].strip(), run.stdout
    said = json.loads(run.stdout)
    if kind == "why_not":
        return said == {name: value for name, value in answer.items() if name != "kept"}, run.stdout
    predicted = said["predicted"]
    figures = {**predicted, "peak_bytes": max(predicted["peak_bytes"])}
    if kind == "judge" and any(f"--{name} 1" not in " ".join(line) for name in ("tp", "pp")):
        return figures["step_time_s"] <= answer["step_time_s"], figures
    return all(answer[name] == figures[name] for name in ("step_time_s", "samples_per_s", "mfu", "lower_bound_s", "peak_bytes")), figures


def resident_bytes():
    with open(f"/proc/{_process.shared()._child.pid}/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def run(questions, samples, seed, threads=2, say=print):
    """Asks, and returns the differences and the growth of memory after the first third."""
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(Path(folder), seed)
        process = _process.shared()
        warm, failed = None, []

        def some(count, seed):
            try:
                mine = Asker.__new__(Asker)
                mine.__dict__ |= asker.__dict__ | {"random": random.Random(seed)}
                for at in range(count):
                    mine.ask(samples)
                    if at % 50 == 0:
                        with process._lock:
                            process._child.stdin.write(mine.random.choice(LINES) + b"\n")
                            process._child.stdin.flush()
            except BaseException as error:
                failed.append(error)

        start = time.monotonic()
        for part in range(3):
            each = [threading.Thread(target=some, args=(questions // 3 // threads, f"{seed} {part} {t}")) for t in range(threads)]
            [thread.start() for thread in each]
            [thread.join() for thread in each]
            if failed:
                raise failed[0]
            resident = resident_bytes()
            warm = warm or resident
            say(f"after {sum(asker.counts.values())} questions and {time.monotonic() - start:.0f} s: {resident / 1e6:.0f} MB")
        assert _process.shared() is process, "the process has ended, and another was started"
        for (kind, outcome), count in sorted(asker.counts.items()):
            say(f"{kind:8} {outcome:16} {count:7}  {asker.sampled[kind, outcome]} compared with the command line")
        return asker.differ, resident / warm - 1


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    count, samples, seed = given + [2000, 20, 1][len(given) :]
    differ, growth = run(count, samples, seed)
    print(f"growth of memory after the first third: {growth:.1%}")
    for params, line, said in differ:
        print(f"DIFFERS {params}\n  {' '.join(line)}\n  {said}")
    sys.exit(bool(differ or count >= 10_000 and growth > 0.1))
