#!/usr/bin/env bash
# Runs the tests of the Dax tier in a small virtual machine whose persistent memory is a file, on a real DAX device
# (/dev/dax0.0) and on a file system that is mounted with dax: the suites; a restart of the machine; and a machine that is
# killed in the middle of writes.
# With KVDEPOT_REQUIRE_DAX=1 it fails where the virtual machine cannot be made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# The suites take half a minute; an emulated processor on a busy machine needs patience.
TEST_SECONDS_MAX=900
# A multiple of 16 MiB, the granularity of a region. Most of it is never touched.
NVDIMM_BYTES=$((256 << 20))

prepare DAX "${KVDEPOT_REQUIRE_DAX:-}" ndctl e2fsprogs
build_tests kvdepot-io/medium kvdepot-tier/dax_conformance kvdepot-tier/dax_crash kvdepot-tier/dax_device
crash=${binaries[2]} device=${binaries[3]}
start=$SECONDS
work=$(mktemp -d "$VM_DIR/dax.XXXXXX")
trap 'rm -rf "$work"' EXIT
truncate -s "$NVDIMM_BYTES" "$work/nvdimm"
printf '%s\n' 'pipeline: "Cache|Dax"' 'dax_device_path: /dev/dax0.0' 'pool_gb: 0.0625' >"$work/depot.yaml"

begin='set -euo pipefail
export KVDEPOT_TEST_DAX=/dev/dax0.0 RUST_BACKTRACE=0
for module in nfit nd_pmem dax_pmem device_dax; do modprobe -C /dev/null "$module"; done
make_device() {
    ndctl create-namespace --force --reconfig=namespace0.0 --mode=devdax --align="$1" >/dev/null
}
await_device() {
    for ((tries = 600; tries > 0; tries--)); do [ ! -e /dev/dax0.0 ] || return 0; sleep 0.1; done
    echo "there is no /dev/dax0.0" >&2
    exit 1
}
run_test() {
    "$@" --color never --test-threads=1
}
# In place of the device: a file system with dax, with this file as the medium.
file=/mnt/medium
mount_memory() {
    for ((tries = 600; tries > 0; tries--)); do [ ! -b /dev/pmem0 ] || break; sleep 0.1; done
    modprobe -C /dev/null ext4
    [ "$1" = kept ] || mkfs.ext4 -q -b 4096 /dev/pmem0
    mount -t ext4 -o dax=always /dev/pmem0 /mnt
    [ -e "$file" ] || truncate -s 64M "$file"
    export KVDEPOT_TEST_DAX=$file
}
'

# boot STATUS [OPTION...] COMMAND: runs a command in the virtual machine, which must end with this status. What it prints is in
# $work/said, too.
boot() {
    local expected=$1 status=0
    shift
    timeout --kill-after 10 "$TEST_SECONDS_MAX" "$here/run.sh" --nvdimm "$work/nvdimm" "${@:1:$#-1}" "$begin${*: -1}" |
        tee "$work/said" || status=$?
    if [ "$status" != "$expected" ]; then
        printf 'the virtual machine ended with %s instead of %s\n' "$status" "$expected" >&2
        exit 1
    fi
}

# The number of blocks that the last boot acknowledged, by its last line that begins with this word.
acknowledged() {
    sed -n "s/^$1 \([0-9]*\)$/\1/p" "$work/said" | tail -n 1 | grep .
}

# Devices of two alignments. The tests of a crash come last: they leave blocks.
boot 0 "make_device 4096 && await_device
run_test ${binaries[0]}
run_test $device
make_device 2M && await_device
run_test ${binaries[0]}
run_test ${binaries[1]} --skip in_memory
run_test $device
run_test $crash
KVDEPOT_TEST_DAX_ACKNOWLEDGED=0 run_test $crash --exact survivor --nocapture"
kept=$(acknowledged kept)

# After a restart; then the machine is killed in the middle of writes.
boot 137 --kill-at "enough" "await_device
KVDEPOT_TEST_DAX_ACKNOWLEDGED=$kept run_test $crash --exact survivor --nocapture
batches=0
KVDEPOT_TEST_DAX_CRASH=/dev/dax0.0 run_test $crash --exact child --nocapture | while IFS= read -r line; do
    echo \"\$line\"
    [[ \$line != written* ]] || ((++batches != 20)) || echo enough
done"
written=$(acknowledged written)

# After the kill: the blocks, and what kvdepot doctor says of the device (what else it finds here does not matter). Then the
# medium is given up as docs/deploy.md says.
boot 0 "await_device
KVDEPOT_TEST_DAX_ACKNOWLEDGED=$written run_test $crash --exact survivor --nocapture
{ $root/.venv/bin/python -m kvdepot doctor --config $work/depot.yaml || true; } |
    grep '^ok .*medium /dev/dax0.0: a DAX device of 0.24 GiB, formatted for 0.06 GiB'
python3 -c 'import mmap, os; medium = mmap.mmap(os.open(\"/dev/dax0.0\", os.O_RDWR), int(open(\"/sys/bus/dax/devices/dax0.0/size\").read())); medium[:2**20] = medium[-(2**20):] = bytes(2**20)'
KVDEPOT_TEST_DAX_ACKNOWLEDGED=0 run_test $crash --exact survivor --nocapture"
[ "$(acknowledged kept)" = 0 ] || { echo "a medium that was given up still has blocks" >&2 && exit 1; }
# The same on the file system: the suites with media of their own, kill -9 among them; then a kill of the machine.
boot 0 "ndctl create-namespace --force --reconfig=namespace0.0 --mode=fsdax >/dev/null
mount_memory new
unset KVDEPOT_TEST_DAX
export KVDEPOT_TEST_MEMORY_DIR=/mnt
run_test ${binaries[0]}
run_test ${binaries[1]}
run_test $crash
umount /mnt"
boot 137 --kill-at "enough" "mount_memory kept
export KVDEPOT_TEST_DAX_DURABLE=1
batches=0
KVDEPOT_TEST_DAX_CRASH=\$file run_test $crash --exact child --nocapture | while IFS= read -r line; do
    echo \"\$line\"
    [[ \$line != written* ]] || ((++batches != 20)) || echo enough
done"
in_file=$(acknowledged written)
boot 0 "mount_memory kept
KVDEPOT_TEST_DAX_ACKNOWLEDGED=$in_file run_test $crash --exact survivor --nocapture
umount /mnt"
printf 'blocks acknowledged on a file system with dax before the kill: %d\n' "$in_file"
printf 'blocks acknowledged before the restart: %d, before the kill: %d\n' "$kept" "$written"
printf 'virtual machine ran: %d s\n' $((SECONDS - start))
