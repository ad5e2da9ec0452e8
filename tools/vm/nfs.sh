#!/usr/bin/env bash
# Runs the Posix tier on real NFS mounts in a small virtual machine: a server and two nodes, each with a network namespace,
# and so an NFS client, of its own. The suites; two nodes on one directory that are killed over and over, with one cap for
# both; a server that stops and comes back below running depots; a full disk and a used-up quota.
# usage: nfs.sh [--short | --long]
#   --short runs only what shows that two nodes share a mount: blocks, resets, kills below one cap, and UCM's file
#   --long  runs the conformance suite in all its configurations, more kills, and stops the server for a minute
# With KVDEPOT_REQUIRE_NFS=1 it fails where the virtual machine cannot be made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# The tests take some minutes; an emulated processor on a busy machine needs patience.
TEST_SECONDS_MAX=1500

long='' short='' kills=6 outage_s=15 tests=(conformance shared_nodes full_server shared_cap shared_storm)
case "${1:-}" in
    --long) TEST_SECONDS_MAX=7200 long=1 kills=${KVDEPOT_KILLS:-60} outage_s=60 ;;
    --short) short=1 kills=3 tests=(shared_nodes shared_storm) ;;
esac
# The ledger keeps room for what each dead process may still have under way, for some minutes.
capped_kills=$((kills < 12 ? kills : 12))

prepare_nfs
build_tests "${tests[@]/#/kvdepot-tier/}"
start=$SECONDS
status=0
timeout --kill-after 10 "$TEST_SECONDS_MAX" "$here/run.sh" "
$(nfs_programs)
export long=$long short=$short kills=$kills capped_kills=$capped_kills outage_s=$outage_s python=$root/.venv/bin/python here=$here
binaries=(${binaries[*]})
source $here/nfs_guest.sh
source $here/nfs_tests.sh
" || status=$?
printf 'virtual machine ran: %d s\n' $((SECONDS - start))
exit "$status"
