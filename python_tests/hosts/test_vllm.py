"""Proposers for vLLM, on traces of our own calls: they draft what our drafters drafted.

The engine is played by ``Replay``, which keeps vLLM's buffers as its ``InputBatch`` does (vLLM 0.33,
``vllm/v1/worker/gpu_input_batch.py``): int32 texts in rows, drafts behind the end of a text, and the last row
moved to the place of one that has ended.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.serving import target, tokenizer

import specdec_ext
from specdec_ext import NgramDrafter, SuffixDrafter
from specdec_ext.hosts.vllm import NgramProposer, SuffixProposer

LONGEST = 400
PROMPTS = [
    "import os\n\n\ndef read(path):\n",
    "import os\n\n\ndef read(path):\n",
    "class Queue:\n    def put(self, item):\n",
    "x = [1, 2, 3, 1, 2, 3]\n",
]


def config(num_draft_tokens=6, longest=LONGEST, factor=1.0, min_probability=0.1):
    """The fields of ``VllmConfig`` that are read, as vLLM 0.33 fills them for ``custom_class``."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=num_draft_tokens,
            prompt_lookup_min=0,
            prompt_lookup_max=0,
            suffix_decoding_max_spec_factor=factor,
            suffix_decoding_min_token_prob=min_probability,
        ),
        model_config=SimpleNamespace(max_model_len=longest),
    )


class Trace:
    """The steps of a call of ours: the tokens that each emitted, and what was drafted before it."""

    def __init__(self, drafter, prompt: str, new_tokens: int, **kwargs):
        inputs = tokenizer()(prompt, return_tensors="pt")
        self.prompt = inputs["input_ids"][0].tolist()
        self.steps: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self._step: list[int] = []
        propose = drafter.propose

        def recorded(context):
            tree = propose(context)
            self.drafts.append(tree.tokens[0][tree.parents[0] >= 0].tolist())
            return tree

        drafter.propose = recorded
        specdec_ext.generate(
            target(),
            inputs["input_ids"],
            drafter=drafter,
            speculation="fixed",
            max_new_tokens=new_tokens,
            streamer=self,
            **kwargs,
        )
        del drafter.propose

    def put(self, prompt):
        pass

    def put_drafted(self, tokens, drafted):
        self._step.append(int(tokens[0]))

    def end_step(self):
        self.steps.append(self._step)
        self._step = []

    def end(self):
        pass


class Replay:
    """Plays traces to a proposer as vLLM does, and checks its drafts.

    Args:
        proposer: the proposer.
        rows: number of rows of the buffers.
    """

    def __init__(self, proposer, rows: int = 8):
        self.proposer = proposer
        self.lengths = np.zeros(rows, np.int32)
        self.texts = np.full((rows, LONGEST), 7, np.int32)
        self.batch: list[list] = []  # of [trace, number of steps so far]

    def add(self, trace: Trace) -> None:
        row = len(self.batch)
        self.texts[row, : len(trace.prompt)] = trace.prompt
        self.lengths[row] = len(trace.prompt)
        self.batch.append([trace, 0])

    def step(self, reading=()) -> None:
        """One step; requests in ``reading`` read a part of their prompts, and emit nothing."""
        sampled = []
        for row, each in enumerate(self.batch):
            trace, number = each
            tokens = [] if trace in reading else trace.steps[number]
            start = self.lengths[row]
            self.texts[row, start : start + len(tokens)] = tokens
            self.lengths[row] += len(tokens)
            each[1] += trace not in reading
            sampled.append(tokens)
        drafts = self.proposer.propose(sampled, self.lengths, self.texts, slot_mappings=None)
        assert len(drafts) == len(self.batch)
        for row, (trace, number) in enumerate(self.batch):
            if trace in reading:
                assert drafts[row] == []
            elif number < len(trace.steps):
                assert drafts[row] == trace.drafts[number - 1], (row, number)
            start = self.lengths[row]
            self.texts[row, start : start + len(drafts[row])] = drafts[row]  # vLLM's drafts
        self._condense()

    def _condense(self) -> None:
        for row in reversed(range(len(self.batch))):
            trace, number = self.batch[row]
            if number == len(trace.steps):
                last = len(self.batch) - 1
                self.texts[row], self.lengths[row] = self.texts[last].copy(), self.lengths[last]
                self.batch[row] = self.batch[last]
                self.batch.pop()

    def run(self) -> None:
        while self.batch:
            self.step()


def ngram_drafter():
    return NgramDrafter(num_draft_tokens=6)


def test_ngram_drafts_are_those_of_our_drafter_whatever_row_a_request_has():
    traces = [Trace(ngram_drafter(), p, 30 + 9 * i) for i, p in enumerate(PROMPTS)]
    assert max(len(step) for trace in traces for step in trace.steps) > 3  # drafts were accepted
    replay = Replay(NgramProposer(config()))
    replay.add(traces[0])
    replay.add(traces[1])
    replay.step()
    replay.step(reading=[traces[1]])
    replay.add(traces[2])
    replay.step(reading=[traces[2]])
    replay.add(traces[3])
    replay.run()


def test_suffix_drafts_are_those_of_our_drafter_with_earlier_outputs():
    """The outputs of requests that have ended are drafted for later ones."""
    drafter = SuffixDrafter(num_draft_tokens=6, tree=False)
    traces = [Trace(drafter, prompt, 40) for prompt in PROMPTS]
    replay = Replay(SuffixProposer(config()))
    for trace in traces:
        replay.add(trace)
        replay.run()
        replay.proposer.propose([], replay.lengths, replay.texts)  # the batch is empty
    assert len(replay.proposer._drafter.history) == len(drafter.history) == len(PROMPTS)
    assert len(traces[1].steps) < len(traces[0].steps)  # the same text again


def test_lengths_of_matches():
    text = np.array([[1, 2, 3, 9, 3]], np.int32)
    assert NgramProposer(config(4)).propose([[3]], [5], text) == [[]]
    assert NgramProposer(config(4), min_ngram=1).propose([[3]], [5], text) == [[9, 3, 9, 3]]
    with pytest.raises(ValueError, match="ngram"):
        NgramProposer(config(), min_ngram=5, max_ngram=2)


def test_rule_of_the_suffix_drafter():
    """The factor limits a draft by its match, which is of two tokens here."""
    text = np.array([[1, 2, 3, 4, 5, 1, 2]], np.int32)
    for given, expected in (({}, [3, 4]), ({"factor": 2.0}, [3, 4, 5, 1])):
        assert SuffixProposer(config(**given)).propose([[2]], [7], text) == [expected]
    assert SuffixProposer(config(), factor=2.0).propose([[2]], [7], text) == [[3, 4, 5, 1]]
    with pytest.raises(ValueError, match="min_probability"):
        SuffixProposer(config(min_probability=0.0))


def test_nothing_is_drafted_behind_the_longest_text():
    text = np.array([[1, 2, 3, 1, 2, 0, 0, 0]], np.int32)
    for longest, count in ((8, 3), (7, 2), (6, 1), (5, 0)):
        drafts = NgramProposer(config(6, longest)).propose([[2]], [5], text)
        assert len(drafts[0]) == count


def test_a_text_that_changes_is_read_anew():
    """As after a preemption in which another text got the row."""
    proposer = NgramProposer(config(2))
    proposer.propose([[1]], [4], np.array([[5, 6, 5, 6]], np.int32))
    drafts = proposer.propose([[8]], [5], np.array([[7, 8, 9, 7, 8]], np.int32))
    assert drafts == [[9, 7]]


@pytest.mark.parametrize("kind", [NgramProposer, SuffixProposer])
def test_the_class_is_what_vllm_expects(kind):
    """Its constructor takes the config alone, and ``propose`` takes the arguments by position and by name."""
    inspect.signature(kind).bind(config())
    inspect.signature(kind.propose).bind(
        None, [[1]], np.array([1]), np.array([[1]]), slot_mappings={}
    )
    named = dict(sampled_token_ids=[], num_tokens_no_spec=0, token_ids_cpu=0, slot_mappings=None)
    inspect.signature(kind.propose).bind(None, **named)
    assert kind(config()).propose([], np.zeros(0, np.int32), np.zeros((0, 4), np.int32)) == []
