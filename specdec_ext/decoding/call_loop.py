"""``CallLoop``: the decoding loop of one ``generate`` call, from the prompt to the end of all rows."""

from __future__ import annotations

from specdec_ext.decoding.call import Call
from specdec_ext.decoding.loop import DecodingLoop, Round, Timed
from specdec_ext.tree.draft_tree import DraftTree


class CallLoop(DecodingLoop):
    """The loop of one ``generate`` call; the arguments are those of :class:`DecodingLoop`."""

    batch: Call

    def run(self) -> int:
        """Generate until all rows have ended; returns the width of ``sequences``."""
        self._begin()
        while self._unfinished():
            self.step()
        if self.policy is not None:
            self.policy.end()
        return self._finish()

    def _begin(self) -> None:
        """Run the prompt, and emit the first token of each row."""
        call, context, target, policy = self.batch, self.context, self.target, self.policy
        steps = context.max_length - context.prompt_columns
        if policy is not None:
            self.drafter = policy.drafter_of(len(context.rows), steps)
        drafter = self.drafter
        if drafter is not None:
            target.record_hidden_states(drafter.feature_layers(target.model))
        # The token of this root is not read. A prompt of embeddings has none.
        tree = DraftTree.root(context.input_ids.new_zeros(len(context.input_ids)))
        with Timed("prefill", self.stats.seconds):
            output = target.prefill(context.input_ids, context.attention_mask)
            self._num_logits = output.logits.shape[-1]
            call.recorder.prompt(output)
            self._verify(Round(tree, output), is_latest=True)
        self._begin_rounds()
        if self._may_run_ahead and call.sampler.needs_draft_probs:
            self._may_run_ahead = False
            target.tell_round_reason("drafts are verified by another rule than 'match'")
        if drafter is not None:
            drafter.start(context, target.model, output)
        if policy is not None:
            policy.begin(context, self.stats)

    def _finish(self) -> int:
        """Leave the cache with the rows and columns of ``sequences[:, :-1]``; returns their width."""
        context, width = self.context, self.batch.width()
        everyone = range(len(self._layout))
        places = {row: i for i, row in enumerate(self._layout)}
        self.target.reorder([places[row] for row in everyone], active=0)
        columns = [min(context.columns(row), width) for row in everyone]
        self.target.finish(context.last_tokens(everyone), columns)
        return width
