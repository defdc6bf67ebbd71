# Bare `make` lists the targets. Every target installs or builds what it needs itself.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup build demo test unit interop cluster sanity vm sim soak fuzz bench check lint generate clean

GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
TOOL    := $(GO) tool -modfile=.ci/tools/go.mod
BINARY  := bin/gabion

# The simulator: one seed to repeat, or (0) how many new ones to try. The length of one fuzz target's run.
SEED     ?= 0
RUNS     ?= 500
FUZZTIME ?= 30s
# The VM tier: a series of Debian cloud kernels or latest (default both), the processors that guests use at a time
# (default all), a scenario by name (default all), the longer rounds.
KERNEL   ?= 6.1,latest
PARALLEL ?=
SCENARIO ?=
LONG     ?=
# Rounds of the benchmark, and what else the harness is told (see `go run ./bench/harness -h`).
ROUNDS ?= 5
BENCH  ?=

# Real processes are tested by the packages of these directories; the simulator has its own target.
PROCESSES := ./test/interop ./test/cluster ./test/sanity
UNITS      = $(shell $(GO) list ./... | grep -v -e /test/interop -e /test/cluster -e /test/sanity)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install the Debian packages that the tests use, if any is missing
	@.ci/setup

build: ## build bin/gabion, one static binary
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w -X main.version=$(VERSION)' -o $(BINARY) ./cmd/gabion

demo: build ## the guided tour: a server on loopback, a volume's whole life, a kill -9
	@$(BINARY) demo

test: setup unit interop cluster sanity ## all tests but the long ones

unit: ## unit tests, scripts, fuzz seeds and a short simulation, under the race detector
	$(GO) test -race -timeout 20m $(UNITS)

interop: setup build ## foreign NBD clients against a real server
	GABION_BINARY=$(CURDIR)/$(BINARY) $(GO) test -count=1 -timeout 20m ./test/interop

cluster: setup build ## real processes: kills, full disks, strangers, memory, sizes
	GABION_BINARY=$(CURDIR)/$(BINARY) $(GO) test -count=1 -timeout 20m ./test/cluster

sanity: setup build ## csi-sanity, and the CSI field cases, against a real server
	GABION_BINARY=$(CURDIR)/$(BINARY) $(GO) test -count=1 -timeout 20m ./test/sanity

vm: setup ## scenarios on real kernels, in VMs: KERNEL=6.1 SCENARIO=name LONG=1
	$(GO) run ./test/vm/run -kernel '$(KERNEL)' -scenario '$(SCENARIO)' $(if $(PARALLEL),-parallel $(PARALLEL)) $(if $(LONG),-long)

sim: ## the simulator: random schedules; SEED=n repeats one
	$(GO) test -count=1 -timeout 30m ./test/sim -run TestRandom -seed $(SEED) -runs $(RUNS)

soak: setup build ## what needs hours or thousands of rounds
	GABION_SOAK=1 GABION_BINARY=$(CURDIR)/$(BINARY) $(GO) test -count=1 -timeout 6h -v -p 1 $(PROCESSES)
	GABION_SOAK=1 $(GO) test -count=1 -timeout 1h -v ./raft/consensus -run B125
	$(GO) test -count=1 -timeout 6h -v ./test/sim -run TestRandom -runs 50000

fuzz: ## run every fuzz target for FUZZTIME
	@.ci/fuzz $(FUZZTIME)

bench: setup build ## measure against nbdkit, side by side; needs a quiet machine
	$(GO) run ./bench/harness -binary $(BINARY) -rounds $(ROUNDS) $(BENCH)

check: setup lint ## lint, and generated files are up to date
	@.ci/generate --check

lint: ## golangci-lint with the import rules of the layers
	$(TOOL) golangci-lint run ./...

generate: setup ## rewrite the generated files
	@.ci/generate

clean: ## remove what was built
	rm -rf bin
