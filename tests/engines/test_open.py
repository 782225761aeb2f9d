"""What an engine is opened with: the type of the weights, 4 bits, the device, a server."""

from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import cli
from agents import find
from config.errors import UserError
from config.options import EMBEDDED, AskConfig, EvalConfig, RunConfig, StreamConfig
from engines.open import Use, engine_fingerprint, open_reader
from eval import most_in_flight
from models.dtypes import check_device
from models.policy import Policy
from rollout import Sampling, rollout
from tasks.served import Terms
from tasks.worlds import make_task
from tokens.codec import Characters

AGENT = find.resolve("default", EMBEDDED, {}, {"memory_tokens": 8, "final_tokens": 8})[1]
SERVER = ("http://127.0.0.1:1/v1",)


def test_weights_in_4_bits_answer_with_their_own_fingerprint_and_take_adapters(tmp_path):
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model

    from models.load import load_model

    def opened(**settings):
        config = EvalConfig(in_flight=4, **settings)
        engine = open_reader(config, [AGENT])
        return engine, engine_fingerprint(config, engine), engine.model.model.layers[0].mlp

    plain, fingerprint, whole = opened(dtype="float32")
    engine, other, small = opened(dtype="float32", quantise=True)
    assert small.down_proj.weight.dtype == torch.uint8 and fingerprint != other
    assert whole.down_proj.weight.dtype == torch.float32 == engine.dtype
    ids = torch.tensor([[2, 5, 7, 11]])
    with torch.no_grad():
        one, two = (e.model(ids).logits.softmax(-1) for e in (plain, engine))
    assert 1e-4 < (one - two).abs().max() < 0.5  # rounded, and the same policy
    (done,) = rollout(engine, AGENT, [(make_task(0, 2, "one_fact"), 0)], Sampling(0.0))
    assert not done.error and len(done.turns) == 3
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(load_model(EMBEDDED), lora)
    policy.peft_config["default"].base_model_name_or_path = str(EMBEDDED)
    policy.save_pretrained(tmp_path)
    *_, adapted = opened(model=str(tmp_path), quantise=True)
    assert adapted.down_proj.base_layer.weight.dtype == torch.uint8


@pytest.mark.parametrize(("model", "untrained"), [("", False), (str(EMBEDDED), True)])
def test_a_server_is_opened_with_all_that_is_said(monkeypatch, model, untrained):
    seen, terms = {}, Terms(timeout_s=7)
    monkeypatch.setattr("engines.endpoint.EndpointEngine", lambda *a, **how: seen.update(how, a=a))
    names = {"served_as": "m", "untrained": "u"} if untrained else {"served_as": "m"}
    config = EvalConfig(endpoint=SERVER, model=model, in_flight=3, **names)
    open_reader(config, [AGENT], untrained, Use(window=99, terms=terms))
    urls, name, codec = seen.pop("a")
    assert (urls, name) == (SERVER, "u" if untrained else "m")
    assert isinstance(codec, Characters) == seen["chat"] == (not model)
    assert seen | {"chat": 0} == {"window": 99, "concurrency": 3, "chat": 0, "terms": terms}


@pytest.mark.parametrize(("kind", "settings"), [
    (EvalConfig, {"quantise": True, "engine": "vllm"}),
    (EvalConfig, {"quantise": True, "endpoint": SERVER}),
    (EvalConfig, {"dtype": "bfloat16", "endpoint": SERVER}),
    (StreamConfig, {"dtype": "bfloat16"}),
])  # fmt: skip
def test_what_an_engine_cannot_do_is_refused(kind, settings):
    with pytest.raises(UserError):
        kind(**settings)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="mps is here")
def test_a_device_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.app, ["eval", "--n", "1", "--device", "mps", "--name", "x"])
    assert done.exit_code == 2 and "use --device cpu." in done.output


def test_where_torch_has_mps_it_is_passed_through(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    check_device("mps")
    assert all(kind(device="mps").device == "mps" for kind in (AskConfig, StreamConfig, RunConfig))
    found = Policy.of_evaluation(EvalConfig(device="mps"), [AGENT])
    assert (found.device, found.dtype, found.on_gpu) == ("mps", "float32", False)


def test_on_a_cpu_few_trajectories_are_in_flight_and_rows_come_before_the_end(tmp_path):
    (tmp_path / "config.json").write_text("{}")  # sizes that nothing is known of
    for most, model, device, settings in (
        (64, "", "cpu", {}), (16, "Qwen/Qwen3-0.6B", "cpu", {}), (8, "", "cpu", {"in_flight": 8}),
        (16, str(tmp_path), "cpu", {}), (256, "", "cuda", {}), (256, "", "cpu", {"engine": "vllm"}),
        (256, "", "cpu", {"endpoint": SERVER}),
    ):  # fmt: skip
        config = EvalConfig(model=model, **settings)
        assert most_in_flight(config, Policy(model or EMBEDDED, device)) == most


def test_rows_of_a_server_are_the_same_wherever_it_is():
    def of(url, model):
        config = EvalConfig(endpoint=(url,))
        return engine_fingerprint(config, SimpleNamespace(model=model, codec=Characters()))

    assert of("http://a/v1", "m") == of("http://b/v1", "m") != of("http://b/v1", "n")
