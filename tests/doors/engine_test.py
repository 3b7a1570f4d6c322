"""A user-defined engine: a server with a JSON interface."""

import json
import re

import pytest
from helpers import doors, tiny_run

from jaxrl_llm import metrics, register, sync
from jaxrl_llm.sampling import Engine, EngineStats, new_requests
from jaxrl_llm.trainer import build, loop
from jaxrl_llm.types import Origin, Status, join_rows

REASONS = {"stop": Status.FINISHED, "length": Status.OVERLONG}


class Server:
  """Completes requests with its weights; input and output are text."""

  def __init__(self, fns, config):
    self._engine, self._version = Engine(fns, config), None
    self.loads = 0

  def load(self, params, version):
    self._params, self._version = params, version
    self.loads += 1

  def complete(self, text, key, settings):
    asked = json.loads(text)
    assert asked["version"] == self._version
    rows = new_requests(
      asked["prompts"],
      [[number] for number in asked["sample_ids"]],
      range(len(asked["prompts"])),
      self._engine.config,
    )
    out = self._engine.generate_window(
      self._params,
      rows,
      group_size=1,
      window=settings.max_new_tokens,
      key=key,
      settings=settings,
      version=0,
    )
    reasons = {status: name for name, status in REASONS.items()}
    answers = [
      {
        "tokens": tokens[:length].tolist(),
        "logprobs": logprobs[:length].tolist(),
        "finish_reason": reasons[Status(int(status))],
      }
      for tokens, logprobs, length, status in zip(
        out.tokens, out.behavior_logprobs, out.lengths, out.status
      )
    ]
    return json.dumps(answers)


class Client:
  """A `RolloutEngine` that generates complete responses."""

  def __init__(self, fns, config, tokenizer, *, batch=8):
    del tokenizer
    self.config, self.stats, self._batch = config, EngineStats(), batch
    self.server, self._params = Server(fns, config), None

  def generate_window(
    self, params, requests, *, window, key, settings, version, **_
  ):
    assert window >= settings.max_new_tokens and not requests.lengths.any()
    if params is not self._params:
      self.server.load(params, version)
      self._params = params
    rows = join_rows([requests])
    for start in range(0, len(rows.lengths), self._batch):
      chosen = range(start, min(start + self._batch, len(rows.lengths)))
      prompts = [
        rows.prompt_tokens[i, : rows.prompt_lengths[i]].tolist() for i in chosen
      ]
      ids = rows.sample_id[start:][: self._batch].tolist()
      asked = {"prompts": prompts, "sample_ids": ids, "version": version}
      answers = self.server.complete(json.dumps(asked), key, settings)
      for i, answer in zip(chosen, json.loads(answers)):
        length = len(answer["tokens"])
        rows.tokens[i, :length] = answer["tokens"]
        rows.behavior_logprobs[i, :length] = answer["logprobs"]
        rows.version[i, :length], rows.mask[i, :length] = version, True
        rows.origin[i, :length], rows.lengths[i] = int(Origin.POLICY), length
        rows.status[i] = int(REASONS[answer["finish_reason"]])
    self.stats += EngineStats(tokens=int(rows.lengths.sum()))
    return rows


def test_a_server_trains_as_the_built_in_engine_does(model, tmp_path):
  register.engine("server", Client)
  rows = doors.train(
    model,
    tmp_path / "server",
    sampler__engine="server",
    sampler__engine_settings={"batch": 7},
  )
  expected = doors.train(model, tmp_path / "built in")
  of_the_engine = ("rollout/decode_steps", "rollout/idle_fraction")
  for got, wanted in zip(
    tiny_run.comparable(tmp_path / "server"),
    tiny_run.comparable(tmp_path / "built in"),
  ):
    # Fixed tokens are decoded by the built-in engine only.
    assert "sampler_trainer/parity_error" not in got
    wanted.pop("sampler_trainer/parity_error", None)
    wanted = {k: v for k, v in wanted.items() if k not in of_the_engine}
    got = {k: v for k, v in got.items() if k not in of_the_engine}
    assert got.keys() == wanted.keys()
    for name in got:
      # Rounding depends on batch sizes.
      assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
  assert rows[-1]["rollout/tokens"] == expected[-1]["rollout/tokens"]


class Stale(Client):
  """From version 1 on, the log-prob of one token is of other weights."""

  def generate_window(self, params, requests, **given):
    rows = super().generate_window(params, requests, **given)
    if given["version"] == 1:
      rows.behavior_logprobs[5, 2] -= 0.19
    return rows


def test_one_wrong_log_prob_of_a_server_stops_the_run(model, tmp_path):
  register.engine("stale", Stale)
  run = build.make_run(doors.make_config(model, sampler__engine="stale"))
  with pytest.raises(sync.SyncError) as error:
    loop.train(run, tmp_path)
  said = str(error.value)
  assert said.startswith("step 2: the log-probs of engine 'stale' differ")
  named = r"token \d+ \('.*'\) at position 2 of response \d+, .* version 1: "
  assert re.search(named + r"-\S+ and -\S+ \(difference 0\.19 nats", said)
  rows = metrics.read_rows(tmp_path / "metrics.jsonl")
  assert [row["step"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
  "changes",
  [
    {"model__sampler_dtype": "bfloat16"},  # What the server computes in.
    {"sampler__parity_check_every": 0},
  ],
)
def test_a_declared_precision_or_no_check_lets_it_go_on(
  model, tmp_path, changes
):
  register.engine("stale", Stale)
  config = doors.make_config(model, sampler__engine="stale", **changes)
  loop.train(build.make_run(config), tmp_path)
  rows = metrics.read_rows(tmp_path / "metrics.jsonl")
  assert rows[2]["sampler_trainer/logprob_diff_max"] > 0.1
