"""Names of earlier versions, and what has replaced them."""

# fmt: off
# Keys whose last name has changed, too.
_KEYS = {
  "estimator.drop_pivot": "method.use=('mc_grpo',)",
  "loss.auxiliary": "a method, algorithm.change(auxiliary=...)",
  "loss.hapo_sign": "method.hapo.sign",
  "off_policy.ewma_decay": "method.ppo_ewma.decay",
  "off_policy.keep_weights": "method.kept_weights.dtype",
  "off_policy.ess_scale": "method.vcpo.scale_steps",
  "value.head": "method.use=('hl_gauss',)",
  "value.ensemble": "method.use=('asyppo',)",
  "sampler.entropy_tau": "method.hapo.tau",
  "sampler.processors": "a method, algorithm.change(processors=...)",
  "schedule.prune": "method.use=('arrol',)",
  "schedule.prune_at": "method.arrol.at",
  "schedule.prune_keep": "method.arrol.keep",
  "schedule.replay_for": "method.use=('dart',)",
}
# Values of keys such as estimator.name, loss.name and data.order -> methods.
_VALUES = {
  "hinted": "adhint", "hints": "adhint", "example": "dars",
  "distillation": "distill", "token_group": "hapo", "inter_intra": "nudge",
  "contexts": "nudge", "cross_probe": "poise", "reward_to_go": "reinforce_pp",
  "given": "sft", "likelihood": "sft", "demonstrations": "sft",
  "optimal_baseline": "vcpo", "sharpened": "xrpo", "segments": "sae",
  "clip_off_policy_mask": "deepseek_v3_2", "unbiased": "deepseek_v3_2",
  "dppo_tv": "dppo", "dppo_kl": "dppo", "policy_gradient": "rloo",
  "dis": "sao", "interpolate": "a_3po", "ewma": "ppo_ewma",
  "target_rate": "dots", "repairs": "scope",
}
# fmt: on


def of_key(key: str) -> str:
  """Returns what has replaced a key; '' if nothing has."""
  return f"it is {_KEYS[key]} now" if key in _KEYS else ""


def of_value(value: object, methods: tuple[str, ...]) -> str:
  """Returns the setting that has replaced a value; '' if nothing has."""
  name = value if value in methods else _VALUES.get(str(value))
  return f"; it is a method now: method.use=({name!r},)" if name else ""
