"""One begin token on every path, truncation, end ids, decoding."""

import json

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, processors
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import BUILTIN_TASK
from hybridflow.data.tokenizer import load_tokenizer, truncate
from hybridflow.utils.errors import ConfigError, DataError
from tests.tiny import VOCABULARY, save_tokenizer

PLAIN = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
WITH_BEGIN = "{{ bos_token }}" + PLAIN
OPENED = "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
CHAT = [{"role": "user", "content": "1+1"}]
BOS = VOCABULARY["<bos>"]


def save(folder, *, adds_begin, template=None, generation=None, bos="<bos>"):
    rust = RustTokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    rust.decoder = decoders.Fuse()
    if adds_begin:
        rust.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="<pad>", eos_token="<eos>", bos_token=bos, unk_token="<unk>"
    )
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("template", [PLAIN + OPENED, WITH_BEGIN + OPENED])
@pytest.mark.parametrize("prompt", [CHAT, "1+1=", "<bos>1+1="])
def test_a_prompt_has_one_begin_token_where_the_tokenizer_uses_one(tmp_path, template, prompt):
    ids = save(tmp_path, adds_begin=True, template=template).encode_prompt(prompt)
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


def test_a_template_decides_alone_where_the_tokenizer_adds_no_begin_token(tmp_path):
    assert BOS not in save(tmp_path / "a", adds_begin=False, template=PLAIN).encode_prompt(CHAT)
    assert save(tmp_path / "b", adds_begin=False, template=WITH_BEGIN).encode_prompt(CHAT).count(BOS) == 1
    assert BOS not in save(tmp_path / "c", adds_begin=False).encode_prompt("1+1=")


def test_a_chat_opens_the_turn_of_the_assistant_and_template_arguments_arrive(tmp_path):
    tokenizer = save(tmp_path, adds_begin=False, template=PLAIN + OPENED + "{{ extra }}")
    assert tokenizer.render(CHAT, extra="xyz") == "user:1+1\nassistant:xyz"


def test_a_chat_without_a_template_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no chat template"):
        save(tmp_path, adds_begin=False).encode_prompt(CHAT)


@pytest.mark.parametrize(("mode", "kept"), [("left", [3, 4, 5, 6]), ("right", [1, 2, 3, 4]), ("middle", [1, 2, 5, 6])])
def test_truncation_keeps_the_named_part(mode, kept):
    assert truncate([1, 2, 3, 4, 5, 6], 4, mode, keep_first=False, where="") == kept
    assert truncate([1, 2, 3, 4], 4, mode, keep_first=False, where="") == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["left", "right", "middle"])
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_truncation_can_keep_the_begin_token_and_always_gives_the_limit(mode, limit):
    kept = truncate([9, 1, 2, 3, 4, 5, 6], limit, mode, keep_first=True, where="")
    assert len(kept) == limit
    assert kept[0] == 9
    assert kept[1:] == sorted(kept[1:])


def test_truncation_error_names_the_row_and_both_lengths():
    with pytest.raises(DataError, match=r"train.jsonl row 7.*6 tokens.*max_prompt_length is 4"):
        truncate([1, 2, 3, 4, 5, 6], 4, "error", keep_first=False, where="train.jsonl row 7")


def test_end_ids_are_those_of_tokenizer_and_generation_config(tmp_path):
    assert save(tmp_path / "a", adds_begin=False).eos_ids == (1,)
    assert save(tmp_path / "b", adds_begin=False, generation={"eos_token_id": [7, 1, 9]}).eos_ids == (1, 7, 9)
    assert save(tmp_path / "c", adds_begin=False, generation={"eos_token_id": 7}).eos_ids == (1, 7)


def test_a_damaged_generation_config_is_an_error_and_not_a_model_without_one(tmp_path):
    save(tmp_path, adds_begin=False, generation={"eos_token_id": 7})
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        load_tokenizer(str(tmp_path))


def test_decoding_drops_special_ids_and_ids_beyond_the_vocabulary(tmp_path):
    tokenizer = save(tmp_path, adds_begin=False)
    four, two = VOCABULARY["4"], VOCABULARY["2"]
    assert tokenizer.decode_responses([[four, two, 1], [], [four, len(VOCABULARY) + 5, two, 0, 0]]) == ["42", "", "42"]
    assert tokenizer.vocabulary_size == len(VOCABULARY)


def test_decoding_keeps_blanks_before_punctuation(tmp_path):
    tokenizer = save(tmp_path, adds_begin=False)
    text = "a , b ."
    assert tokenizer.decode_responses(tokenizer.encode_text([text])) == [text]


def test_pad_falls_back_to_the_end_token(tmp_path):
    rust = RustTokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<eos>").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_id == 1


def test_a_folder_without_tokenizer_or_end_token_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_tokenizer(str(tmp_path / "empty"))
    rust = RustTokenizer(models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=rust).save_pretrained(tmp_path / "endless")
    with pytest.raises(ConfigError, match="end token"):
        load_tokenizer(str(tmp_path / "endless"))


def test_the_embedded_tokenizer_reads_its_prompts(tmp_path):
    tokenizer = load_tokenizer(BUILTIN_TASK)
    ids = tokenizer.encode_prompt("37+85=")
    assert len(ids) == 6
    assert tokenizer.decode_responses([ids]) == ["37+85="]
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.bos_id) == (0, (1,), None)


def test_the_tiny_test_tokenizer_loads_too(tmp_path):
    save_tokenizer(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode_prompt("1+1=") == [VOCABULARY[c] for c in "1+1="]


GROUPED = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}"
    "{% if messages[loop.index0 - 1]['role'] != 'tool' %}{{ 'tool:' }}{% endif %}{{ m['content'] + '.' }}"
    "{% else %}{{ m['role'] + ':' + m['content'].split(')')[-1] + '\n' }}{% endif %}"
    "{% endfor %}"
)


def test_a_conversation_in_a_prompt_is_the_template_s_own_rendering(tmp_path):
    """E09, E10, E16: separators stay, two tool replies are grouped, earlier thinking goes where the template drops it.

    All of it is prompt: no id of an earlier turn is ever trained (B19). Rollouts of several turns are refused.
    """
    tokenizer = save(tmp_path, adds_begin=False, template=GROUPED + OPENED)
    turns = (("user", "1+1"), ("assistant", "(hm)add"), ("tool", "2"), ("tool", "3"), ("user", "sum"))
    chat = [{"role": role, "content": content} for role, content in turns]
    text = "user:1+1\nassistant:add\ntool:2.3.user:sum\nassistant:"
    assert tokenizer.render(chat) == text
    assert tokenizer.decode_responses([tokenizer.encode_prompt(chat)]) == [text]
