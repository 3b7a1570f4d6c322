"""Throughput and utilisation of a training step."""

from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.metrics.chips import PEAK_FLOPS
from jaxrl_llm.models.transformer import multiplied_params


def speed(learner: Learner, row: dict[str, float]) -> dict[str, float]:
  """Returns tokens per second of sampling and of the step, and utilisation.

  Utilisation (MFU) counts 2 · parameters FLOPs per token for each forward pass
  and 4 · parameters for each backward pass, of policy and critic. Embeddings
  are looked up, so they count only as the policy's head.
  """
  out = {
    "rollout/tokens_per_second": row["rollout/tokens"] / row["time/generate_s"],
    "perf/tokens_per_second": row["perf/tokens"] / row["time/step_s"],
  }
  mesh = learner.mesh
  peak = PEAK_FLOPS.get(mesh.devices.flat[0].device_kind)
  if peak:
    multiplied = multiplied_params(learner.policy.fns.config)
    done = (2 + 6 * learner.policy.settings.epochs) * multiplied
    if learner.critic is not None:
      config = learner.critic.fns.config
      head = config.vocab_size * config.hidden_size
      multiplied = learner.critic.fns.count * (multiplied_params(config) - head)
      done += (2 + 6 * learner.critic.settings.epochs) * multiplied
    names = ("score", "update_value", "update_policy")
    seconds = sum(row.get(f"time/{name}_s", 0.0) for name in names)
    flops = done * row["perf/tokens"]
    out["perf/mfu"] = flops / seconds / (peak * mesh.size)
  return out
