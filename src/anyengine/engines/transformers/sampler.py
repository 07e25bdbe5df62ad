"""Picks the next token of every request of a step at once, on the model's device.

Requests that are greedy and ask for nothing else cost one argmax. The order for the others is vLLM's: logit_bias, then
penalties, then temperature, min_p, top_k and top_p. What allowed_token_ids and min_tokens forbid is taken out before
the temperature; no arithmetic brings it back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from anyengine.errors import RequestRefusedError
from anyengine.params import SamplingParams
from anyengine.types import TokenLogprobs

PARAMETERS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos",
    "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids",
)  # fmt: skip
"""The fields of :class:`SamplingParams` that this engine honours."""

_MINUS_INFINITY = float("-inf")
_LARGEST = torch.finfo(torch.float32).max
_FEW = 1024


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class SamplingState:
    """What the sampler keeps of one request, on its device; None is what the request did not ask for.

    ``bias`` is added to the logits, ``counts`` says how often each token was generated and ``prompt`` which occur in
    the prompt, ``forbidden`` which may not come at all (each ``[vocab]``). ``stops`` are the tokens that end the
    request, kept away until min_tokens.
    """

    params: SamplingParams
    greedy: bool
    stop_token_ids: frozenset[int]  # looked up at each token, however many there are
    generated: int = 0
    generator: torch.Generator | None = None
    bias: torch.Tensor | None = None
    forbidden: torch.Tensor | None = None
    stops: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    prompt: torch.Tensor | None = None


class Sampler:
    """The sampler of one engine. Requests without a seed draw from a generator that is seeded with ``seed``."""

    def __init__(self, vocab_size: int, eos_token_ids: Collection[int], device: torch.device, seed: int) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def start(self, params: SamplingParams, prompt: Sequence[int] | torch.Tensor) -> SamplingState:
        """The state of a new request.

        :param prompt: the ids of its tokens; a tensor if they may be many
        :raises RequestRefusedError: if a parameter names a token that the model does not have, or all tokens are
            forbidden
        """
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            worst = max(getattr(params, name) or (0,))
            if worst >= self._vocab_size:
                raise RequestRefusedError(
                    f"SamplingParams.{name} holds {worst}: the model has {self._vocab_size} tokens"
                )
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        self._check_allowed(params, stops)
        # With one candidate left the rest of the parameters decide nothing, and this way ties end as in greedy.
        state = SamplingState(
            params=params,
            greedy=params.temperature == 0 or params.top_k == 1,
            stop_token_ids=frozenset(params.stop_token_ids),
        )
        if params.seed is not None and not state.greedy:
            state.generator = torch.Generator(self._device).manual_seed(params.seed)
        if params.allowed_token_ids is not None:
            state.forbidden = torch.ones(self._vocab_size, dtype=torch.bool, device=self._device)
            state.forbidden[list(params.allowed_token_ids)] = False
        if params.logit_bias:
            state.bias = torch.zeros(self._vocab_size, device=self._device)
            state.bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), device=self._device)
        if params.min_tokens and stops:
            state.stops = torch.tensor(sorted(stops), device=self._device)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            state.counts = torch.zeros(self._vocab_size, device=self._device)
            state.prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            state.prompt[torch.as_tensor(prompt, dtype=torch.long, device=self._device)] = True
        return state

    def _check_allowed(self, params: SamplingParams, stops: set[int]) -> None:
        allowed = range(self._vocab_size) if params.allowed_token_ids is None else set(params.allowed_token_ids)
        if params.min_tokens and len(stops) >= len(allowed) and stops.issuperset(allowed):
            raise RequestRefusedError(
                f"SamplingParams.min_tokens={params.min_tokens}: all tokens that may come are stop tokens, of which "
                "none may come before it"
            )

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, states: Sequence[SamplingState]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """The next token of each row of ``logits`` ``[request, vocab]``, and log-probabilities of rows that want them.

        Log-probabilities are those of the logits as they are. A token is -1 if the row holds NaN or infinity.
        """
        wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        logprobs = logits[wanted].float().log_softmax(-1) if wanted else None
        if not all(state.greedy and _plain(state) for state in states):
            logits = self._adjust(logits.float(), states)
        best, tokens = logits.max(-1)
        drawn = [row for row, state in enumerate(states) if not state.greedy]
        if drawn:
            scores = logits[drawn] - best[drawn, None]
            tokens[drawn] = self._draw(scores, [states[row] for row in drawn])
        # max() lets NaN through, so this one row of numbers tells; the only transfer to the host in most steps.
        chosen: list[int] = _to_host(torch.where(best.isfinite(), tokens, -1))
        for state, token in zip(states, chosen, strict=True):
            state.generated += 1
            if state.counts is not None and token >= 0:
                state.counts[token] += 1
        if logprobs is None:
            return chosen, {}
        counts = [states[row].params.logprobs or 0 for row in wanted]
        ranked = _rank(logprobs, [max(chosen[row], 0) for row in wanted], counts)
        return chosen, dict(zip(wanted, ranked, strict=True))

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
        """For each row of ``logits`` ``[token, vocab]`` the log-probabilities of the token that came and the best."""
        return _rank(logits.float().log_softmax(-1), tokens, [count] * len(tokens))

    def _adjust(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        """Apply, in place, what changes single logits."""
        for row, state in enumerate(states):
            scores = logits[row]
            adjusted = scores
            if state.bias is not None:
                adjusted = adjusted + state.bias
            if state.counts is not None and state.prompt is not None:
                generated = state.counts > 0
                factor = state.params.repetition_penalty
                penalised = torch.where(adjusted > 0, adjusted / factor, adjusted * factor)
                adjusted = torch.where(generated | state.prompt, penalised, adjusted)
                adjusted -= state.params.frequency_penalty * state.counts + state.params.presence_penalty * generated
            if adjusted is not scores:
                # Finite logits stay finite, however large they are; what the model made infinite or NaN stays that.
                adjusted = adjusted.clamp_(-_LARGEST, _LARGEST)
                logits[row] = torch.where(scores.isfinite(), adjusted, scores)
            # Last, so that nothing that was computed before lets a token through.
            if state.forbidden is not None:
                scores[state.forbidden] = _MINUS_INFINITY
            if state.stops is not None and state.generated < state.params.min_tokens:
                scores[state.stops] = _MINUS_INFINITY
        return logits

    def _draw(self, scores: torch.Tensor, states: Sequence[SamplingState]) -> torch.Tensor:
        """Draw one token from each row of ``scores``, whose greatest is 0."""

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=scores.device)[:, None]

        # Scaled after the greatest was made 0, so that no temperature, however small, leads to infinity or NaN.
        scores /= column([state.params.temperature for state in states])
        if any(state.params.min_p for state in states):
            floor = column([state.params.min_p for state in states]).log()
            scores.masked_fill_(scores < floor, _MINUS_INFINITY)
        cut = [row for row, state in enumerate(states) if state.params.top_k > 0 or state.params.top_p < 1.0]
        if cut:
            floor = self._threshold(scores[cut], [states[row].params for row in cut])
            scores[cut] = scores[cut].masked_fill(scores[cut] < floor, _MINUS_INFINITY)
        # The greatest of score + Gumbel noise is a draw from the softmax. Unlike inverting the cumulative sum it hardly
        # reacts to the last bits of the logits, which depend on what else is in the batch. In float64, since the tail
        # of the noise decides over rare tokens; made from uniform numbers, which cost a quarter of exponential ones.
        noise = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
        if any(state.generator is None for state in states):
            noise.uniform_(generator=self._generator)
        for row, state in enumerate(states):
            if state.generator is not None:
                noise[row].uniform_(generator=state.generator)
        return (scores - noise.log_().neg_().log_()).argmax(-1)

    def _threshold(self, scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """The smallest score that top_k and top_p leave in each row, as a column. Equal scores are never told apart."""
        whole = scores.shape[1]
        limits = [param.top_k if 0 < param.top_k < whole else whole for param in params]
        # 1.0 is no bound at all: the sum of what comes before the last ones may be rounded up to it.
        bounds = [param.top_p if param.top_p < 1.0 else math.inf for param in params]
        limit, bound = torch.tensor(limits, device=scores.device), torch.tensor(bounds, device=scores.device)
        floor, decided = _cut(scores, limit, bound, min(_FEW, whole))
        # Sorting the vocabulary costs more than the rest of the sampler together, and the best few nearly always do.
        if max(limits) > _FEW and not decided.all():
            rows = decided.logical_not().nonzero()[:, 0]
            floor[rows] = _cut(scores[rows], limit[rows], bound[rows], whole)[0]
        return floor[:, None]


def _to_host(tensor: Any) -> Any:
    return tensor.tolist()


def _rank(logprobs: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of ``[position, vocab]``: its token's log-probability, then as many of the best as it wants."""
    own: list[float] = _to_host(logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0])
    best = logprobs.topk(min(max(counts), logprobs.shape[1]), dim=-1)
    values: list[list[float]] = _to_host(best.values)
    indices: list[list[int]] = _to_host(best.indices)
    return [
        {token: value, **dict(zip(indices[row][:count], values[row][:count], strict=True))}
        for row, (token, value, count) in enumerate(zip(tokens, own, counts, strict=True))
    ]


def _plain(state: SamplingState) -> bool:
    return state.bias is state.forbidden is state.stops is state.counts is None


def _cut(
    scores: torch.Tensor, limit: torch.Tensor, bound: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest score among the ``limit`` best of each row whose betters have less than ``bound`` of their mass.

    Looks at the best ``width`` scores only, and says for which rows that is enough.
    """
    best = scores.topk(width, dim=-1).values
    best.masked_fill_(torch.arange(width, device=scores.device) >= limit[:, None], _MINUS_INFINITY)
    within = limit <= width
    total = torch.where(within, best.logsumexp(-1), scores.logsumexp(-1))
    mass = (best - total[:, None]).exp().cumsum(-1)
    kept = 1 + (mass[:, :-1] < bound[:, None]).sum(-1)
    floor = best.gather(1, torch.minimum(kept, limit)[:, None] - 1)[:, 0]
    return floor, within | ((limit == scores.shape[1]) & (mass[:, -1] >= bound))
