# What a contributor runs. `make ci` is what CI runs.

GO ?= go
TOOL = $(GO) tool -modfile=$(CURDIR)/tools/go.mod
# a module of its own
EXAMPLE = cd examples/compressed-image &&

.PHONY: test integration bench-transfer lint golden generate ci

# The unit tests: no libvirt, no root, no network.
test:
	$(GO) test -race -shuffle=on -count=1 -timeout 20m $(TESTFLAGS) ./...
	$(EXAMPLE) $(GO) test -race -shuffle=on -count=1 $(TESTFLAGS) ./...

# The same provider against real libvirtd, QEMU, OpenSSH and cloud-init. Needs root on Debian 12; the script installs
# and starts what is missing, and touches nothing else of the host.
integration:
	internal/testhost/testhost.sh up
	KVM2_REQUIRE_TESTHOST=1 $(GO) test -tags integration -count=1 -p 1 -timeout 60m -run RealHost $(TESTFLAGS) ./...

# The image transfer against virsh and scp, on the same host as the integration tests. Only ratios within one run count.
bench-transfer:
	internal/testhost/testhost.sh up
	KVM2_REQUIRE_TESTHOST=1 $(GO) test -tags integration -run '^$$' -bench RealHost_Transfer -benchtime 6x -timeout 30m .

lint:
	$(TOOL) golangci-lint run --build-tags integration ./...
	$(EXAMPLE) $(TOOL) golangci-lint run ./...

# Write the golden files anew. Look at the difference before you commit it.
golden:
	$(GO) test . -update

# Write the deep-copy functions anew.
generate:
	$(TOOL) controller-gen object paths=.

ci:
	.ci/run
