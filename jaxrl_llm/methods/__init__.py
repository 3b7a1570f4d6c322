"""Methods beyond PPO, GRPO, DAPO, VC-PPO, VAPO and T-PPO, one file each.

A file registers the parts of its method, as a file of `--plugin` does. It is
imported when a config first chooses one of them and never by the package
itself, so that an unused method costs nothing. This table is the only list of
what the files register.
"""

# File -> kind of a part -> its name, or several with spaces between: a value of
# `estimator.name`, `estimator.lambda_schedule`, `loss.name`, `loss.kl`,
# `data.order` or `off_policy.proximal`, the setting that switches it on, or the
# name of an input, of a companion or of frozen models that other parts read.
FILES: dict[str, dict[str, str]] = {
  "a_3po": {"proximal": "interpolate"},
  "cispo": {"loss": "cispo"},
  "deepseek_v3_2": {"loss": "clip_off_policy_mask", "kl": "unbiased"},
  "distill": {
    "estimator": "distillation",
    "frozen": "teachers",
    "leaf": "teacher_logprobs",
  },
  "dppo": {"loss": "dppo_tv dppo_kl"},
  "evpo": {"estimator": "evpo"},
  "gdpo": {"estimator": "gdpo"},
  "gspo": {"loss": "gspo"},
  "hapo": {
    "estimator": "token_group",
    "loss": "hapo",
    "logits_processor": "entropy_tau",
  },
  "kpop": {"loss": "kpop"},
  "kept_weights": {"companion": "kept", "leaf": "writer_logprobs"},
  "maxrl": {"estimator": "maxrl"},
  "mc_grpo": {"mask": "drop_pivot"},
  "ppo_ewma": {"companion": "ema", "leaf": "average_logprobs"},
  "reinforce_pp": {"estimator": "reward_to_go"},
  "rloo": {"loss": "policy_gradient"},
  "sae": {"lambda_rule": "segments"},
  "sao": {"loss": "dis"},
  "sapo_gate": {"loss": "sapo_gate"},
  "sft": {
    "estimator": "given",
    "loss": "likelihood",
    "prompt_source": "demonstrations",
  },
  "turn_gae": {"estimator": "turn_gae", "value_mask": "turn_gae"},
  "vcpo": {
    "estimator": "optimal_baseline",
    "step_scale": "ess_scale",
    "leaf": "gradient_norms",
  },
}
