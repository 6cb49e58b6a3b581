"""The names of the metrics that more than one module reads; what vLLM counts, too, has its name.

Counters are exported with the suffix ``_total``, as Prometheus' clients do it.
"""

from __future__ import annotations

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
GENERATION_TOKENS = "vllm:generation_tokens"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
TIME_TO_FIRST_TOKEN = "vllm:time_to_first_token_seconds"
INTER_TOKEN_LATENCY = "vllm:inter_token_latency_seconds"

REACHED_PER_POSITION = "specdec:spec_decode_num_reached_per_pos"
STEPS, STEP_TOKENS = "specdec:steps", "specdec:step_tokens"
TIMED_SECONDS, PLAIN_SECONDS = "specdec:timed_seconds", "specdec:plain_seconds"
REFERENCE_REACHED = "specdec:reference_reached_per_pos"
REFERENCE_ACCEPTED = "specdec:reference_accepted_per_pos"

POSITION = "position"  # the label of metrics by position; it counts from 0
