"""Estimates Monte Carlo values of states by continuing responses."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm import digest
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import core, parts, providers
from jaxrl_llm.metrics.writers import JsonlWriter, read_rows
from jaxrl_llm.rollout.turns import ConversationConfig
from jaxrl_llm.rollout.writer import ResponseWriter, Weights
from jaxrl_llm.sampling.requests import cut
from jaxrl_llm.types import Origin, Rollout, Status, take_rows

_ROUNDS = 8  # Continuations per chunk and slot of the engine.


class States(NamedTuple):
  """S states, each before a token of a response, and their returns."""

  row: np.ndarray  # int [S], the response.
  at: np.ndarray  # int [S], the token.
  position: np.ndarray  # float [S], share of the response before it.
  turn: np.ndarray  # int [S], turns before it.
  returns: np.ndarray = np.zeros((0, 0))  # float [S, K].


def find_states(rollout: Rollout, rows: Sequence[int], positions: int):
  """Returns evenly spaced states of responses, before tokens of the policy."""
  found = []
  for row in rows:
    own = rollout.origin[row, : rollout.lengths[row]] == Origin.POLICY
    tokens = np.flatnonzero(own)
    even = (np.arange(positions) + 0.5) / positions * len(tokens)
    turns = np.cumsum(np.diff(own.astype(int), prepend=0) > 0) - 1
    for place in np.unique(even.astype(int)):
      at = tokens[place]
      found.append((row, at, (place + 0.5) / len(tokens), turns[at]))
  return States(*map(np.asarray, zip(*found)))


def continue_from(
  states: States,
  writer: ResponseWriter,
  weights: Weights,
  judged: Any,
  returns_of: Callable[[Any, np.ndarray], np.ndarray],
  first_id: int,
) -> tuple[np.ndarray, int]:
  """Continues every state K times, from one shared prefill per state.

  Args:
    states: S states.
    writer: writer with K responses per prompt.
    weights: weights of the policy.
    judged: the responses that contain the states.
    returns_of: (responses, tokens [B]) -> returns from these tokens on, [B].
    first_id: the first unused sample id.

  Returns:
    Returns, float [S, K], NaN where the reward failed, and the number of
    generated tokens.
  """
  count = writer.group_size
  index = np.repeat(np.arange(len(states.row)), count)
  rows, at = states.row[index], states.at[index]
  begun = take_rows(judged.responses.rollout, rows).replace(
    group_id=index.astype(np.int32),
    sample_id=(first_id + np.arange(len(rows))).astype(np.int32),
  )
  for row, length in enumerate(at):
    cut(begun, row, length, status=Status.TRUNCATED)
  kept = np.arange(begun.tokens.shape[1]) < at[:, None]
  prompts = [judged.prompts[row] for row in rows]
  given, talks = begun, {}
  if writer.turn_taking is None:
    # A prefix of given tokens is prefilled once for all continuations.
    given = begun.replace(mask=np.zeros_like(begun.mask))
  else:
    talks = replay(writer.turn_taking, begun, prompts)
  written = writer.write(given, weights, conversations=talks)
  written = written.replace(mask=np.where(kept, begun.mask, written.mask))
  responses = writer.judge(written, prompts, talks).responses
  found = np.where(responses.judged, returns_of(responses, at), np.nan)
  return found.reshape(-1, count), int((written.lengths - at).sum())


def replay(
  config: ConversationConfig, rollout: Rollout, prompts: Sequence[Any]
) -> dict[str, str]:
  """Returns the conversations of prefixes, by replaying their turns."""
  turns = []
  for row, length in enumerate(rollout.lengths):
    own = rollout.origin[row, :length] == Origin.POLICY
    cuts = np.flatnonzero(np.diff(own)) + 1
    pieces = np.split(rollout.tokens[row, :length], cuts)[: len(cuts)]
    turns.append([config.tokenizer.decode(x) for x in pieces[::2]])
  talks = [json.loads(config.begin(prompt)) for prompt in prompts]
  for depth in range(max(map(len, turns), default=0)):
    live = [i for i, said in enumerate(turns) if depth < len(said)]
    calls = [
      {"state": talks[i]["state"], "response": turns[i][depth]} for i in live
    ]
    for i, (answer, failed) in zip(live, config.call(calls)):
      if failed:
        raise InputError(f"the environment failed on a known turn: {failed}")
      rewards = talks[i]["rewards"]
      for name, value in answer["rewards"].items():
        rewards[name] = rewards.get(name, 0.0) + value
      talks[i] |= {"state": answer["state"], "turns": depth + 1}
  return {str(k): json.dumps(x) for k, x in zip(rollout.sample_id, talks)}


def monte_carlo(learner: Any, gamma: float) -> Callable[..., np.ndarray]:
  """Returns (responses, tokens [B]) -> returns from these tokens on, [B]."""
  # Also for a run without a critic.
  known = {**learner.algorithm.parts, "returns": core.returns(gamma, 1.0)}
  names = parts.leaves_of(["returns"], known)

  def returns_of(responses, at):
    given = providers.of_responses(responses, 0, names, learner.column)
    # Returns with lambda 1 do not depend on scores of models.
    none = np.zeros(responses.rollout.mask.shape, np.float32)
    given |= {name: none for name in names - given.keys()}
    found = parts.evaluate(["returns"], known, given)["returns"]
    return np.asarray(found)[np.arange(len(at)), at]

  return returns_of


def sample_truth(run: Any, weights: Weights, judged: Any, options: Any):
  """Returns the continued states of all responses, within the token budget.

  Raises:
    InputError: the file has continuations of another policy or setting.
  """
  rollout, path = judged.responses.rollout, pathlib.Path(options.out)
  path /= "truth.jsonl"
  count, positions = options.continuations, options.positions
  writer = dataclasses.replace(run.evaluators[0].writer, group_size=count)
  drawn_by = {"weights": weights.params, "responses": rollout.tokens}
  identity = [positions, count, digest.checksum(drawn_by)]
  done = read_rows(path) if path.exists() else []
  if any(row["identity"] != identity for row in done):
    raise InputError(
      f"{path}: continuations of another policy or setting; give another --out"
    )
  order = np.random.default_rng(0).permutation(len(rollout.lengths))
  states = find_states(rollout, order, positions)
  size = max(1, _ROUNDS * writer.engine.config.slots // count)
  returns_of = monte_carlo(run.learner, run.config.estimator.gamma)
  file, begun, new = JsonlWriter(path), time.perf_counter(), 0
  file.truncate_after(len(done) - 1)  # Drops an incomplete line.
  for step in range(len(done), -(-len(states.at) // size)):
    if sum(row["tokens"] for row in done) >= options.tokens:
      break
    start = step * size
    chunk = States(*(x[start : start + size] for x in states[:-1]))
    # Distinct sample ids, so that each continuation has different noise.
    first = len(rollout.lengths) + start * count
    returns, tokens = continue_from(
      chunk, writer, weights, judged, returns_of, first
    )
    known = np.isfinite(returns).all(axis=1)
    found = [x[known].tolist() for x in (*chunk[:-1], returns)]
    row = {"step": step, "identity": identity, "tokens": tokens}
    done.append(row | dict(zip(States._fields, found)))
    file.append(done[-1:])
    new, spent = new + tokens, time.perf_counter() - begun
    rate = f"{new:,} tokens in {spent:.0f} s, {new / spent:.0f}/s"
    print(
      f"{start + len(known)} of {len(states.at)} states: {rate}", flush=True
    )
  file.close()
  return join(done)


def join(chunks: Sequence[dict[str, Any]]) -> States:
  """Joins the states of chunks; a chunk whose rewards failed has none.

  Raises:
    InputError: There are no states.
  """
  some = [chunk for chunk in chunks if chunk["row"]]
  if not some:
    raise InputError(
      "no state has the returns of all its continuations; raise --tokens, or"
      " fix the reward if it failed"
    )
  return States(
    *(
      np.concatenate([chunk[name] for chunk in some]) for name in States._fields
    )
  )
