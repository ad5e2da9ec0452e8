#!/usr/bin/env bash
# Runs, on a kernel's software RDMA device (rxe) in a small virtual machine, the conformance suite of kvdepot-verbs and
# the tests of the wire door's RDMA.
# Makes what it needs by itself: Debian packages (as root), a kernel, an initial file system; kept under .work/vm.
# Where that cannot be, it says why and succeeds; with KVDEPOT_REQUIRE_RDMA=1 it fails instead.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export VM_DIR=${VM_DIR:-$root/.work/vm}
# The tests themselves take half a minute; an emulated processor on a busy machine needs patience.
TEST_SECONDS_MAX=900

skip() {
    printf 'SKIPPED: RDMA tests did not run: %s\n' "$1" >&2
    [ -z "${KVDEPOT_REQUIRE_RDMA:-}" ] || exit 1
    exit 0
}

start=$SECONDS
reason=$("$here/setup.sh" 2>&1 >/dev/null | tail -n 1) || skip "${reason:-setup failed}"
printf 'virtual machine ready: %d s\n' $((SECONDS - start))

start=$SECONDS
# With the features that `make test-rust` builds with, those of the whole workspace: what that has built is used again.
binaries=$(cd "$root" && cargo test --quiet --workspace --test conformance --test wire_rdma --test wire_rdma_faults \
    --no-run --message-format=json |
    python3 -c '
import json, pathlib, sys
wanted = {
    ("kvdepot-verbs", "conformance"): None,
    ("kvdepot-server", "wire_rdma"): None,
    ("kvdepot-server", "wire_rdma_faults"): None,
}
for message in map(json.loads, sys.stdin):
    if message.get("executable"):
        name = pathlib.Path(message["manifest_path"]).parent.name, message["target"]["name"]
        if name in wanted:
            wanted[name] = message["executable"]
if None in wanted.values():
    sys.exit(f"not built: {[name for name, binary in wanted.items() if binary is None]}")
print(*wanted.values(), sep="\n")')
printf 'tests built: %d s\n' $((SECONDS - start))

start=$SECONDS
status=0
timeout --kill-after 10 "$TEST_SECONDS_MAX" "$here/run.sh" "set -e
modprobe rdma_rxe
rdma link add rxe0 type rxe netdev lo
export KVDEPOT_TEST_VERBS=system RUST_BACKTRACE=0
for binary in ${binaries//$'\n'/ }; do
    \$binary --color never --test-threads=1 $*
done" || status=$?
printf 'virtual machine ran: %d s\n' $((SECONDS - start))
exit "$status"
