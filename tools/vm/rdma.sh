#!/usr/bin/env bash
# Runs, on a kernel's software RDMA device (rxe) in a small virtual machine, the conformance suite of kvdepot-verbs and
# the tests of the wire door's RDMA.
# With KVDEPOT_REQUIRE_RDMA=1 it fails where the virtual machine cannot be made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# The tests themselves take half a minute; an emulated processor on a busy machine needs patience.
TEST_SECONDS_MAX=900

prepare RDMA "${KVDEPOT_REQUIRE_RDMA:-}" iproute2 ibverbs-providers
build_tests kvdepot-verbs/conformance kvdepot-server/wire_rdma kvdepot-server/wire_rdma_faults
start=$SECONDS
status=0
timeout --kill-after 10 "$TEST_SECONDS_MAX" "$here/run.sh" "set -e
modprobe rdma_rxe
rdma link add rxe0 type rxe netdev lo
export KVDEPOT_TEST_VERBS=system RUST_BACKTRACE=0
for binary in ${binaries[*]}; do
    \$binary --color never --test-threads=1 $*
done" || status=$?
printf 'virtual machine ran: %d s\n' $((SECONDS - start))
exit "$status"
