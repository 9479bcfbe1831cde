# `make demo` and `make test` need Python and make, nothing else; both build .venv on their own.

PYTHON := $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/everystep demo

test: export OMP_NUM_THREADS = 1
test: lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=40

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Without the constraints, pip may choose a far larger build of torch.
$(STAMP): pyproject.toml constraints.txt src/everystep/engine/_stream.c src/everystep/deltas/_codec.c src/everystep/recovery/_adam.c src/everystep/state/_same.c \
		src/everystep/tap/_packets.c src/everystep/tap/_roce.c src/everystep/tap/_tcp.c \
		src/everystep/tap/_arena.h src/everystep/tap/_crc.h src/everystep/tap/_forms.h \
		src/everystep/tap/_rows.h
	test -x $(BIN)/pip || $(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@
