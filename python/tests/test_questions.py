"""A few hundred random questions to one process, good and bad, a sample of them compared with the command line."""

import importlib.util
import unittest
from pathlib import Path

import altiplano

FILE = Path(__file__).resolve().parents[2] / "tests" / "oracle" / "questions.py"


class RandomQuestions(unittest.TestCase):
    def test_the_process_answers_as_the_command_line_does(self):
        spec = importlib.util.spec_from_file_location("questions", FILE)
        questions = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(questions)
        said = []
        # So few questions fill no cache, and say nothing about the growth of memory.
        differ, _ = questions.run(300, 2, seed=3, say=said.append)
        self.assertEqual(differ, [], "\n".join(said))
        kinds = {line.split()[0] for line in said if "compared" in line}
        self.assertEqual(kinds, set(questions.KINDS), said)

    def test_a_difference_is_found(self):
        spec = importlib.util.spec_from_file_location("questions", FILE)
        questions = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(questions)
        demo = str(questions.DEMO)
        line = ["plan", demo, "--cluster", "local:2", "--tp", "1", "--pp", "1", "--json"]
        answer = altiplano.plan(demo, cluster="local:2", tp=1, pp=1).figures
        self.assertTrue(questions.agrees("plan", answer, line)[0])
        self.assertFalse(questions.agrees("plan", answer | {"peak_bytes": 1 + answer["peak_bytes"]}, line)[0])


if __name__ == "__main__":
    unittest.main()
