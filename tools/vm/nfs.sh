#!/usr/bin/env bash
# Runs the Posix tier on real NFS mounts in a small virtual machine: a server and two nodes, each with a network namespace,
# and so an NFS client, of its own. The suites; two nodes on one directory that are killed over and over; a server that
# stops and comes back below running depots; a full disk and a used-up quota.
# usage: nfs.sh [--long]
#   --long  runs the conformance suite in all its configurations, more kills, and stops the server for a minute
# With KVDEPOT_REQUIRE_NFS=1 it fails where the virtual machine cannot be made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# The tests take some minutes; an emulated processor on a busy machine needs patience.
TEST_SECONDS_MAX=1500

long='' kills=6 outage_s=15
if [ "${1:-}" = --long ]; then
    TEST_SECONDS_MAX=7200 long=1 kills=${KVDEPOT_KILLS:-60} outage_s=60
fi

prepare NFS "${KVDEPOT_REQUIRE_NFS:-}" iproute2 e2fsprogs
if ! reason=$(unpack nfs nfs-kernel-server quota 2>&1 >/dev/null | tail -n 1) || [ -n "$reason" ]; then
    printf 'SKIPPED: NFS tests did not run: %s\n' "$reason" >&2
    [ -z "${KVDEPOT_REQUIRE_NFS:-}" ] || exit 1
    exit 0
fi
build_tests kvdepot-tier/conformance kvdepot-tier/shared_nodes kvdepot-tier/full_server kvdepot-tier/shared_cap
start=$SECONDS
nfs=$VM_DIR/nfs/root
status=0
timeout --kill-after 10 "$TEST_SECONDS_MAX" "$here/run.sh" "
export PATH=\$PATH:$nfs/sbin:$nfs/usr/sbin:$nfs/usr/bin
export LD_LIBRARY_PATH=$nfs/usr/lib/x86_64-linux-gnu:$nfs/lib/x86_64-linux-gnu
export long=$long kills=$kills outage_s=$outage_s python=$root/.venv/bin/python here=$here
binaries=(${binaries[*]})
source $here/nfs_guest.sh
source $here/nfs_tests.sh
" || status=$?
printf 'virtual machine ran: %d s\n' $((SECONDS - start))
exit "$status"
