# make demo | make check | make test | make lint | make test-all | make test-oldest | make bench     (everything else is set up by these)
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLASSES := $(VENV)/.spark-classes.jsa
export SPARK_LOCAL_IP ?= 127.0.0.1
export PYTHONUNBUFFERED = 1
# Tests start hundreds of processes, which read what the first of them has compiled (images of containers forbid it).
export PYTHONDONTWRITEBYTECODE =
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Tests spend much of their time waiting for other processes; each of these has a cluster of its own.
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest tests -q
# A process that died is not replaced: pytest-xdist (3.8) would wait for ever at the end.
SIDE_BY_SIDE := -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

WITH_OLDEST := VENV=$(VENV) PYTHON=$(PYTHON) bash tests/oldest.sh

COMPOSE ?= docker compose
# Says how far pip is: in a terminal in one line, in a log now and then. Errors come as ever.
PROGRESS = awk -v terminal="$$(test -t 2 && echo yes)" '\
  /^Collecting / { found++; \
    if (terminal) printf "\r\033[K  %d found: %s", found, $$2; \
    else if (found % 40 == 0) print "  " found " found: " $$2 " ..."; fflush() } \
  /^Installing collected/ { if (terminal) printf "\r\033[K"; \
    print "  " found " found; now they are installed ..."; fflush() } \
  /^Successfully installed/ { print "  done." }'

.PHONY: demo cluster-demo gpu-check check test test-all test-oldest planted lint docs release bench bench-peers horovod install java clean

demo: install ## Trains a network on two Spark workers and shows the result
	@$(BIN)/python examples/demo.py

cluster-demo: ## The same on a standalone cluster in containers; needs Docker or another engine
	$(COMPOSE) -f docker/compose.yaml up --build --wait master worker
	$(COMPOSE) -f docker/compose.yaml run --rm demo; \
	  status=$$?; $(COMPOSE) -f docker/compose.yaml down; exit $$status

gpu-check: ## Is sparkdl right and fast on this machine's GPU? Needs Keras, and PyTorch or JAX; no Spark, no network
	$(PYTHON) tests/gpu/kit.py

check: lint ## Two minutes: lint, types, and all tests without JVM, Keras and other processes
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not long and not keras and not processes and not spark"

test: java lint $(VENV)/.torch $(VENV)/.horovod $(CLASSES) ## Lint, types, and all tests of normal weight
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow" --durations=10
	$(WITH_OLDEST) tests/spark -m oldest

test-all: java lint $(VENV)/.torch $(VENV)/.horovod $(CLASSES) ## The heavier checks too
	$(PYTEST) $(SIDE_BY_SIDE) --durations=20
	$(MAKE) test-oldest
	VENV=$(VENV) bash tests/writers.sh

test-oldest: java ## With Spark 3.5 and the oldest packages, in an environment of its own
	$(WITH_OLDEST) $(SIDE_BY_SIDE) tests/unit tests/spark -m "not slow"

planted: java $(STAMP) ## One-line faults in a copy of the tree, each with the test file that must fail
	$(BIN)/python tests/planted.py --jobs $(TEST_PROCESSES)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

bench: install ## Every benchmark; prints the tables of docs/benchmarks.md
	$(BIN)/python benchmarks/run.py

bench-peers: install $(VENV)/.torch ## Against Elephas, TorchDistributor and Ray Train; two virtual environments of their own
	$(BIN)/python benchmarks/peers.py
	$(BIN)/python benchmarks/torch_peers.py

docs: ## The site, into build/site; strict: a link that leads nowhere fails it. Needs no Java
	@test -x $(VENV)-docs/bin/mkdocs || { echo "Setting up $(VENV)-docs, once ..."; \
	  $(PYTHON) -m venv $(VENV)-docs && \
	  $(VENV)-docs/bin/python -m pip install --quiet $$($(PYTHON) docs/site/requirements.py); }
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet --site-dir build/site
	@echo "build/site/index.html: $$(find build/site -name '*.html' | wc -l) pages"

release: java ## Wheel, source archive, SBOM and images into dist/, tried as a user would; publishes nothing
	$(PYTHON) release/release.py

horovod: install ## Builds Horovod's wheel against the installed TensorFlow (minutes; cached)
	PYTHON=$(abspath $(BIN))/python bash docker/build_horovod.sh

install: java $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "sparkdl needs Python 3.11 or newer; this is $$($(PYTHON) --version)."; \
	    echo "Install it (Debian: apt-get install python3 python3-venv) or: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed. Debian: apt-get install python3-venv"; exit 1; }
	@echo "Setting up $(VENV), once: $$(grep -c == constraints.txt) packages at most, some minutes ..."
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@set -o pipefail; PYTHONWARNINGS=ignore $(BIN)/python -m pip install -c constraints.txt -e '.[dev]' | $(PROGRESS)
	@touch $(STAMP)

# Where Horovod cannot be built, its tests skip and say so; all else is tested. WITHOUT_HOROVOD=1
# leaves it out. The wheel is kept in ~/.cache/sparkdl/wheels: only the first build takes minutes.
$(VENV)/.horovod: $(STAMP) docker/build_horovod.sh
	@if [ -n "$(WITHOUT_HOROVOD)" ]; then echo "without Horovod, as asked: its tests will skip"; \
	elif PYTHON=$(abspath $(BIN))/python bash docker/build_horovod.sh; then touch $@; \
	else echo "Horovod is not installed (the reason is above): its tests will skip"; fi

# Only the tests need PyTorch, which is large on some machines, and KerasHub.
$(VENV)/.torch: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,hub]'
	@touch $@

# The classes that Spark loads, as JVMs read them fastest. Without it tests start more slowly.
$(CLASSES): $(STAMP) tests/start/java_options.py
	@$(BIN)/python tests/start/java_options.py $@ || \
	  { echo "no archive of Spark's classes (the reason is above): sessions start more slowly"; rm -f $@*; }

java:
	@java -version >/dev/null 2>&1 || \
	  { echo "Spark needs Java 17 or newer, and 'java' was not found."; \
	    echo "Install it (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17)"; \
	    echo "and make sure that 'java -version' works, or set JAVA_HOME and PATH."; exit 1; }
	@version=$$(java -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -1); \
	  test "$${version:-0}" -ge 17 || \
	  { echo "Spark 4 needs Java 17 or newer; 'java' is version $$version."; exit 1; }

clean:
	rm -rf $(VENV) $(VENV)-docs $(VENV)-oldest build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
