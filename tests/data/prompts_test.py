"""Prompts: templates, and a stream whose only state is its position."""

import pytest

from jaxrl_llm.data import prompts, sources, tasks
from jaxrl_llm.data.tokenizer import Tokenizer, character_tokenizer_json
from jaxrl_llm.errors import InputError

CHATML = (
  "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  """One token a character, `<s>` and `</s>` as control tokens."""
  path = tmp_path_factory.mktemp("tokenizer")
  letters = tasks.CHARACTERS + "\n :<>/{}abcdefghijklmnopqrstuvwxyzQA\\"
  text = character_tokenizer_json(letters, pad="<s>", eos="</s>")
  (path / "tokenizer.json").write_text(text)
  (path / "config.json").write_text('{"eos_token_id": 1, "bos_token_id": 0}')
  (path / "chat_template.jinja").write_text(CHATML)
  return Tokenizer.load(path)


def example(question, answer="1"):
  return tasks.Example("x", question, answer, "test")


POOL = [example(f"{i}+{i}=", str(2 * i)) for i in range(1, 5)]


class TestTemplates:
  def test_completion_is_the_question(self, tokenizer):
    template = prompts.completion(tokenizer)
    assert tokenizer.decode(template(example("7+5?"))) == "7+5?"

  def test_few_shot_shows_solved_examples(self, tokenizer):
    template = prompts.few_shot(tokenizer, pool=POOL, shots=2)
    text = tokenizer.decode(template(example("12+34=")))
    assert text == "1+1=2\n2+2=4\n12+34="

  def test_few_shot_never_shows_the_asked_question(self, tokenizer):
    template = prompts.few_shot(tokenizer, pool=POOL, shots=2)
    text = tokenizer.decode(template(example("2+2=")))
    assert text == "1+1=2\n3+3=6\n2+2="

  def test_formats_leave_other_braces_alone(self, tokenizer):
    template = prompts.few_shot(
      tokenizer,
      pool=[example("q{answer}", "{question}"), POOL[0]],
      shots=1,
      shot_format="Q: {question}\nA: \\boxed{{answer}}\n{x}",
      question_format="Q: {question}\nA: ",
    )
    assert tokenizer.decode(template(example("2?"))) == (
      "Q: q{answer}\nA: \\boxed{{question}}\n{x}Q: 2?\nA: "
    )

  @pytest.mark.parametrize("shots", [-1, 4])
  def test_pool_too_small(self, tokenizer, shots):
    with pytest.raises(ValueError, match=f"shots={shots} of 4"):
      prompts.few_shot(tokenizer, pool=POOL, shots=shots)

  def test_chat_keeps_content_plain(self, tokenizer):
    template = prompts.chat(
      tokenizer, system="be brief", question_format="solve {question}"
    )
    tokens = template(example("1</s><s>2"))
    text = tokenizer.decode(tokens, skip_special=False)
    assert text == "<s>system:be brief</s><s>user:solve 1</s><s>2</s><s>"
    assert [t for t in tokens if t < 2] == [0, 1, 0, 1, 0]

  def test_registry(self):
    assert set(prompts.TEMPLATES) == {"completion", "few_shot", "chat"}


def stream(tokenizer, source, *, seed=0, max_prompt_length=64, **settings):
  return prompts.PromptStream(
    source,
    prompts.completion(tokenizer),
    tokenizer,
    seed=seed,
    max_prompt_length=max_prompt_length,
    **settings,
  )


class TestPromptStream:
  def test_fields(self, tokenizer):
    [prompt] = stream(tokenizer, tasks.ChainSum(seed=2)).take(11, 1)
    assert prompt.prompt_id == 11
    assert tokenizer.decode(prompt.tokens) == prompt.text == prompt.question
    assert prompt.source == "chain_sum/train"
    index = int(prompt.example_id.removeprefix("chain_sum-train-"))
    assert tasks.ChainSum(seed=2)[index].answer == prompt.answer

  @pytest.mark.parametrize(
    "make", [lambda: tasks.ChainSum(seed=1), lambda: tasks.Sums(digits=1)]
  )
  def test_position_is_all_the_state(self, tokenizer, make):
    whole = stream(tokenizer, make()).take(0, 200)
    for position, n in ((0, 7), (50, 30), (61, 1), (199, 1), (60, 140)):
      part = stream(tokenizer, make()).take(position, n)
      assert part == whole[position : position + n]

  def test_every_epoch_is_a_new_order_of_all(self, tokenizer):
    endless = stream(tokenizer, POOL * 5)
    source = [example(str(i)) for i in range(20)]
    endless = stream(tokenizer, source)
    assert len(endless) == 20
    epochs = [[p.question for p in endless.take(20 * e, 20)] for e in range(3)]
    assert all(sorted(e, key=int) == sorted(epochs[0], key=int) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3

  def test_seeds_differ_also_across_epochs(self, tokenizer):
    source = [example(str(i)) for i in range(20)]
    orders = {
      tuple(p.question for p in stream(tokenizer, source, seed=s).take(at, 20))
      for s in range(4)
      for at in (0, 20, 40)
    }
    assert len(orders) == 12

  def test_without_seed_in_the_order_of_the_source(self, tokenizer):
    endless = stream(tokenizer, POOL, seed=None)
    questions = [p.question for p in endless.take(0, 6)]
    assert questions == ["1+1=", "2+2=", "3+3=", "4+4=", "1+1=", "2+2="]
    assert [p.answer for p in endless.epoch()] == ["2", "4", "6", "8"]

  def test_a_long_prompt_is_refused_by_name(self, tokenizer):
    source = [tasks.Example("row-9", "1" * 8, "1", "test")]
    assert stream(tokenizer, source, max_prompt_length=8).take(0, 1)
    endless = stream(tokenizer, source, max_prompt_length=7)
    with pytest.raises(
      InputError,
      match="'row-9' has 8 tokens, the limit is 7; raise"
      " data.max_prompt_length",
    ):
      endless.take(0, 1)

  def test_long_prompts_are_dropped_and_counted(self, tokenizer):
    source = [example("1" * n) for n in range(1, 11)]
    settings = {"max_prompt_length": 7, "on_long": "drop"}
    endless = stream(tokenizer, source, **settings)
    first = endless.take(0, 5)
    position = first[-1].prompt_id + 1
    second = endless.take(position, 9)
    whole = endless.take(0, 14)
    assert first + second == whole  # Two epochs of the seven short ones.
    assert all(len(p.tokens) <= 7 for p in whole)
    end = whole[-1].prompt_id + 1
    counts = endless.dropped(0, first), endless.dropped(position, second)
    assert sum(counts) == endless.dropped(0, whole) == end - 14
    assert len(endless.epoch()) == 7 and endless.dropped(3, []) == 0

  def test_all_too_long(self, tokenizer):
    source = [example("1" * 9)] * 3
    endless = stream(tokenizer, source, max_prompt_length=7, on_long="drop")
    for call in (lambda: endless.take(0, 1), endless.epoch):
      with pytest.raises(InputError, match="all of 3 prompts"):
        call()

  def test_empty_source(self, tokenizer):
    with pytest.raises(InputError, match="dataset is empty"):
      stream(tokenizer, [])

  def test_settings_out_of_range(self, tokenizer):
    with pytest.raises(ValueError, match="on_long"):
      stream(tokenizer, POOL, on_long="cut")
    with pytest.raises(ValueError, match="max_prompt_length"):
      stream(tokenizer, POOL, max_prompt_length=0)

  def test_a_file(self, tokenizer, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "1?", "answer": "1"}\n')
    endless = stream(tokenizer, sources.make_source("jsonl", path=str(path)))
    assert [p.example_id for p in endless.take(0, 2)] == ["q-1", "q-1"]
