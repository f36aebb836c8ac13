# Every target first makes .venv with what it needs; a second call finds it there. How: .ci/venv.
#   make test PYTHON=python3.12     start from another python
#   make test ARGS='-k packing -x'  pass options on to pytest

PYTHON ?= python3
JOBS ?= 2
ARGS ?=
TOOL ?= memcheck
export PYTHON
# Some environments forbid writing bytecode. Tests start a hundred processes, each of which would compile the toolkit anew.
unexport PYTHONDONTWRITEBYTECODE

RUN := .venv/bin/python -m
OUT := out/smollm2-135m-nvfp4a16
MIXED := out/smollm2-135m-4.8bits
QUICKLY := out/smollm2-135m-fp8
# Losses are told on text of the calibration's kind and on text of another: a module of Python's own library.
PYTHON_TEXT = $(shell .venv/bin/python -c 'import typing; print(typing.__file__)')
TEXTS = --calib benchmarks/data/calibration.txt --eval benchmarks/data/evaluation.txt --eval $(PYTHON_TEXT) --seqlen 256

.PHONY: demo test test-oldest test-newest coverage lint docs docs-test gpu-test slow-test vllm-test sanitize bench clean

demo: .venv/.engines  ## SmolLM2-135M three times: to NVFP4 by GPTQ, to 4.8 mixed bits, to an engine; QUICK=1 rounds it to FP8 and runs it
ifdef QUICK
	@echo "rounding to nearest, a measurement and a few words: less than a minute on two quiet cores"
	.venv/bin/quantize smollm2-135m --format fp8_channel --effort 0 $(TEXTS) --eval-samples 2 --out $(QUICKLY) --overwrite
	.venv/bin/quant generate $(QUICKLY) --prompt "The capital of France is" --max-new-tokens 2
else
	@echo "about six minutes on two cores: four for GPTQ and for the mix, one for the engine; 'make demo QUICK=1' takes less than one"
	.venv/bin/quantize smollm2-135m --format nvfp4a16 --solver gptq $(TEXTS) --calib-samples 4 --eval-samples 4 \
		--out $(OUT) --overwrite
	.venv/bin/quantize smollm2-135m --bits 4.8 --format nvfp4a16,fp8a16 $(TEXTS) --calib-samples 4 \
		--eval-samples 4 --out $(MIXED) --overwrite
	.venv/bin/quant generate $(MIXED) --prompt "The capital of France is" --max-new-tokens 2
	if .venv/bin/python -c 'import tensorrt_rtx' 2>/dev/null; then .venv/bin/quant export $(OUT) --to tensorrt \
		--target rtx5090 --shapes batch=1:1:4,sequence=1:128:512 --out $(OUT).engine --overwrite; fi
endif

test: .venv/.compiled  ## the tests that need neither a GPU nor minutes; a thread per process, so that they do not compete
	OMP_NUM_THREADS=1 $(RUN) pytest -n $(JOBS) --dist worksteal $(ARGS)

slow-test: .venv/.engines  ## the tests on whole models
	$(RUN) pytest -m 'slow and not gpu' $(ARGS)

test-oldest: .venv/.dev  ## the tests that go through transformers, with the oldest version that pyproject.toml allows
	.ci/transformers oldest -n $(JOBS) --dist worksteal $(ARGS)

test-newest: .venv/.dev  ## the same with the newest release
	.ci/transformers newest -n $(JOBS) --dist worksteal $(ARGS)

coverage: .venv/.compiled  ## the lines that `make test` runs, as pages in out/coverage
	.venv/bin/python -m pip --disable-pip-version-check install --quiet pytest-cov
	OMP_NUM_THREADS=1 $(RUN) pytest -n $(JOBS) --dist worksteal --cov --cov-report=term --cov-report=html:out/coverage $(ARGS)

gpu-test: .venv/.compiled  ## the tests that need a CUDA device; compiling is most of it, so JOBS should fit the cores
	OMP_NUM_THREADS=2 $(RUN) pytest -m gpu -n $(JOBS) --dist worksteal $(ARGS)

vllm-test: .venv/.engines  ## the tests of the vLLM plug-in against the Python files of vLLM's releases
	OMP_NUM_THREADS=1 .venv/bin/python tests/vllm_releases.py $(ARGS)

sanitize: .venv/.engines  ## compute-sanitizer over GPU tests: TOOL=racecheck ARGS='tests/kernels/attention/test_decode_attention.py'
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $(TOOL) --error-exitcode 1 --kernel-name-exclude regex=at:: \
		$(RUN) pytest -m gpu -p no:xdist $(ARGS)

lint: .venv/.dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	.venv/bin/lint-imports

docs: .venv/.docs  ## the documentation as a site in out/docs; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

docs-test: .venv/.engines  ## every command and Python line of README, docs/ and the notebooks, on tiny models
	OMP_NUM_THREADS=1 $(RUN) pytest tests/test_documented_commands.py -m "not gpu" -n $(JOBS) $(ARGS)
	PYTHONPATH=. .venv/bin/python tests/readme_blocks.py

bench: .venv/.bench  ## every measurement of docs/benchmarks.md, with its peers; those of vLLM need its environment
	set -e; for script in $(filter-out benchmarks/vllm_%,$(wildcard benchmarks/[a-z]*.py)); do echo "== $$script"; .venv/bin/python $$script; done

clean:
	rm -rf .venv .venv-transformers-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.dev: pyproject.toml .ci/venv
	.ci/venv dev
	touch $@

# TensorRT-RTX builds engines without a GPU. Where there is no wheel of it, its tests say so and the demo ends earlier.
.venv/.engines: .venv/.dev
	.venv/bin/python -m pip --disable-pip-version-check install --no-compile --quiet --retries 0 --timeout 15 \
		--constraint .venv/pins.txt --editable '.[tensorrt-rtx]' || echo "no TensorRT-RTX here: engines are left out" >&2
	touch $@

# The processes of the tests would each compile what they import; here each file is compiled once, on all cores.
.venv/.compiled: .venv/.engines
	-.venv/bin/python -m compileall -qq -j $(JOBS) .venv/lib
	touch $@

.venv/.docs: .venv/.dev
	.venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint .venv/pins.txt --editable '.[docs]'
	touch $@

.venv/.bench: pyproject.toml .ci/venv
	.ci/venv dev,modelopt
	touch $@ .venv/.dev
