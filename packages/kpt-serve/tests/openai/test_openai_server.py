import asyncio
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
from language_models import save_model, served

pytestmark = pytest.mark.filterwarnings("ignore")  # of what transformers imports

TOKEN = "secret"
BOUNDS = ("--max-tokens", "800", "--max-prompt", "200", "--max-running", "4", "--max-waiting", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def address(folder):
    with served(folder, "--token", TOKEN, *BOUNDS) as (_, found):
        yield found


@pytest.fixture
def client(address):
    from openai import OpenAI

    with OpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0) as made:
        yield made


def chat(client, text="Hello", **options):
    asked = {"max_tokens": 24, "temperature": 0} | options
    return client.chat.completions.create(model="toy", messages=[{"role": "user", "content": text}], **asked)


def prompt_of(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def text_of(stream):
    return "".join(part.choices[0].delta.content or "" for part in stream if part.choices)


def metrics(address):
    lines = httpx2.get(f"{address}/metrics").raise_for_status().text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def gain(before, after, start):
    return sum(value - before.get(name, 0) for name, value in after.items() if name.startswith(start))


@pytest.fixture(scope="module")
def generated(folder):
    """What `generate` says to a text, without KPT."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def answer(prompt, tokens):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found = model.generate(ids, max_new_tokens=tokens, do_sample=False)
        return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    return answer


def test_greedy_answers_are_those_of_generate_by_each_route(client, generated):
    want = generated(prompt_of("Hello"), 24)
    assert len(set(want)) > 4
    answer = chat(client)
    assert answer.choices[0].message.content == want
    assert (answer.model, answer.choices[0].finish_reason) == ("toy", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt_of("Hello")), 24)
    assert text_of(chat(client, stream=True)) == want
    asked = {"model": "toy", "input": "Hello", "max_output_tokens": 24, "temperature": 0}
    assert client.responses.create(**asked).output_text == want
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == want
    got = client.completions.create(model="toy", prompt="Once", max_tokens=9, temperature=0)
    assert got.choices[0].text == generated("Once", 9)


def test_streams_have_openais_end(address):
    body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "max_tokens": 2}
    found = httpx2.post(f"{address}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {TOKEN}"})
    assert found.headers["content-type"].startswith("text/event-stream")
    assert found.text.endswith("\n\ndata: [DONE]\n\n")
    assert all(json.loads(part[6:])["model"] == "toy" for part in found.text.split("\n\n")[:-2])


def test_requests_in_one_batch_keep_their_temperatures(address, generated):
    from openai import AsyncOpenAI

    async def ask(client, **options):
        asked = {"model": "toy", "max_tokens": 48, "messages": [{"role": "user", "content": "Hello"}]}
        return (await client.chat.completions.create(**asked, **options)).choices[0].message.content

    async def together():
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key=TOKEN) as client:
            hot, cold = {"temperature": 2.0}, {"temperature": 0}
            return await asyncio.gather(*(ask(client, **options) for options in (hot, cold, hot, cold)))

    want = generated(prompt_of("Hello"), 48)
    first, second, third, fourth = asyncio.run(together())
    assert second == fourth == want
    assert len({first, third, want}) == 3


def test_metrics_and_kernels_of_kpt_count_a_request(client, address):
    before = metrics(address)
    chat(client, "Count me", max_tokens=10)
    after = metrics(address)
    for name, want in {
        "kpt_prompt_tokens_total": len(prompt_of("Count me")),
        "kpt_generation_tokens_total": 10,
        "kpt_time_to_first_token_seconds_count": 1,
        "kpt_inter_token_latency_seconds_count": 9,
        "kpt_e2e_request_latency_seconds_count": 1,
        'kpt_requests_total{code="200",protocol="openai"}': 1,
        "kpt_num_requests_running": 0,
    }.items():
        assert gain(before, after, name) == want, name
    assert after["kpt_num_requests_running"] == after["kpt_num_requests_waiting"] == 0
    # Two layers in each of ten steps. Attention of a single short sequence is torch's, of several KPT's.
    assert kernel_calls(before, after, "moe.experts") >= 18
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: chat(client, text, max_tokens=40), ("one", "two", "three", "four")))
    assert kernel_calls(after, metrics(address), "attention.paged") >= 18


def kernel_calls(before, after, op):
    """Return how many calls of an op there were, none of which plain PyTorch served."""
    names = [name for name in after if name.startswith("kpt_kernel_calls_total") and f'op="{op}"' in name]
    calls = {name: after[name] - before.get(name, 0) for name in names}
    assert all('backend="torch"' not in name for name, count in calls.items() if count), calls
    return sum(calls.values())


def test_refusals_are_openais_exceptions(client, address):
    import openai

    with pytest.raises(openai.NotFoundError, match="'gpt' does not exist") as caught:
        client.chat.completions.create(model="gpt", messages=[])
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    for options, reason in (
        ({"seed": 1}, "seed='1' is not supported"),
        ({"max_tokens": 801}, "max_tokens must be from 1 to 800"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "chat_template_kwargs="),
        ({"extra_body": {"generation_config": "{}"}}, "generation_config="),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "chat template takes no tools"),
        ({"text": "x" * 190}, "the prompt has 240 tokens; it must have 1 to 200"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason):
            chat(client, **options)
    with pytest.raises(openai.BadRequestError, match="can't be read"):
        client.chat.completions.create(model="toy", messages=[{"content": "no role"}])
    with pytest.raises(openai.BadRequestError, match="the prompt has 0 tokens"):
        client.completions.create(model="toy", prompt="")
    with pytest.raises(openai.APIStatusError, match="more than 16896 bytes") as too_large:
        chat(client, "x" * 20000)
    assert too_large.value.status_code == 413
    broken = b'{"prompt": "Hi", "\\ud800": 1}'  # half a surrogate pair
    found = httpx2.post(f"{address}/v1/completions", content=broken, headers={"authorization": f"bearer  {TOKEN}"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "\ud800")
    with pytest.raises(openai.AuthenticationError, match="send the server's token"):
        chat(client.with_options(api_key="secreT"))


def test_nothing_but_openais_routes_is_there(client, address):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    allowed = {"authorization": f"Bearer {TOKEN}"}
    for path in ("/docs", "/openapi.json", "/redoc", "/", "/v1/chat", "/v1/models/gpt"):
        assert httpx2.get(address + path, headers=allowed).status_code == 404, path
    for path in ("/load_model", "/reset", "/v1/systemone", "/v1/audio/transcriptions", "/health"):
        assert httpx2.post(address + path, headers=allowed, json={"model": "toy"}).status_code == 404, path
    assert httpx2.get(f"{address}/v1/models").status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert httpx2.get(address + path).status_code == 200, path


def test_too_many_requests_are_told_to_come_later(address):
    from openai import OpenAI

    codes = []

    def ask():
        body = {"prompt": "Hi", "max_tokens": 600}
        found = httpx2.post(
            f"{address}/v1/completions", json=body, headers={"authorization": f"Bearer {TOKEN}"}, timeout=60
        )
        codes.append((found.status_code, found.headers.get("retry-after")))

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == sorted([(200, None)] * 6 + [(503, "1")] * 4, key=str)
    with OpenAI(base_url=f"{address}/v1", api_key=TOKEN) as client:
        chat(client)


@pytest.mark.parametrize("stream", [True, False])
def test_who_vanishes_is_cancelled(address, stream):
    before = metrics(address)
    body = {"prompt": "Hi", "max_tokens": 800, "stream": stream}
    allowed = {"authorization": f"Bearer {TOKEN}"}
    with (
        httpx2.Client(headers=allowed, timeout=0.3) as client,
        pytest.raises(httpx2.ReadTimeout)
        if not stream
        else client.stream("POST", f"{address}/v1/completions", json=body) as found,
    ):
        if stream:
            next(found.iter_lines())
        else:
            client.post(f"{address}/v1/completions", json=body)
    time.sleep(0.3)
    after = metrics(address)
    assert after["kpt_num_requests_running"] == after["kpt_num_requests_waiting"] == 0
    assert gain(before, after, "kpt_prompt_tokens_total") == 2
    assert gain(before, after, "kpt_e2e_request_latency_seconds_count") == 0


def certificate(folder):
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "toy")])
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return map(str, paths)


def test_a_package_of_eight_bits_serves_by_tls_and_leaves_no_request_unanswered(folder, tmp_path, generated):
    import ssl

    from kpt_fp8.checkpoints import convert_checkpoint
    from kpt_serve.package.writing import write_transformers

    convert_checkpoint(folder, tmp_path / "eight", to="fp8", granularity="tensor")
    write_transformers(tmp_path / "package", tmp_path / "eight", name="toy8")
    public, private = certificate(tmp_path)
    options = ("--tls-certificate", public, "--tls-key", private, "--settle", "1")
    trust = ssl.create_default_context(cafile=public)
    done = []
    with served(tmp_path / "package", *options, *BOUNDS, tls=True) as (process, address):

        def ask(stream):
            body = {"model": "toy8", "prompt": "Hello", "max_tokens": 700, "temperature": 0, "stream": stream}
            with httpx2.stream("POST", f"{address}/v1/completions", json=body, verify=trust, timeout=60) as found:
                done.append((found.status_code, found.read().count(b"length")))

        threads = [threading.Thread(target=ask, args=(place % 2 == 0,)) for place in range(6)]
        for thread in threads:
            thread.start()
        for _ in range(100):
            counted = metrics_of(address, trust)
            if counted["kpt_prompt_tokens_total"] == 30:  # all are accepted
                break
            time.sleep(0.02)
        assert counted["kpt_num_requests_running"] + counted["kpt_num_requests_waiting"] == 6
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert httpx2.get(f"{address}/ready", verify=trust).status_code == 503
        assert httpx2.get(f"{address}/health", verify=trust).status_code == 200
        for thread in threads:
            thread.join()
        assert process.wait(20) == 0
    assert done == [(200, 1)] * 6


def metrics_of(address, trust):
    lines = httpx2.get(f"{address}/metrics", verify=trust).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_what_is_no_model_is_told_before_torch_is_imported(tmp_path):
    import subprocess
    import sys

    program = (
        "import sys; from kpt_serve.openai import serve; from kpt_serve.errors import PackageError\n"
        "try: serve(sys.argv[1])\n"
        "except PackageError as error: print(error)\n"
        "print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].endswith(
        "is no model; expected a folder with config.json and weights in safetensors"
    )
    assert done.stdout.splitlines()[1] == "[]"


def test_a_taken_port_is_told_before_the_model_is_loaded(folder):
    from kpt_serve.errors import ServeError
    from kpt_serve.openai import OpenAIOptions, serve

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"can't listen on 127.0.0.1:{port}: Address already in use; choose"):
            serve(folder, OpenAIOptions(port=port))
