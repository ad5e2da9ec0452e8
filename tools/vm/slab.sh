#!/usr/bin/env bash
# Runs the tests of the Slab tier on NVMe disks (/dev/nvme0n1) of a small virtual machine, whose bytes are files: the suites
# on disks with blocks of 4096 and of 512 bytes; a restart of the machine; a machine that is killed in the middle of writes;
# and what losses of power would have left of the disk meanwhile.
# The kill alone loses no write that the disk has taken: the disk's cache is the host's page cache, which survives. So QEMU
# also logs the disk's writes and flushes, and power_loss.py drops what no flush covers. A disk that lies about its flushes,
# and a loss of the host's power, are not tested.
# With KVDEPOT_REQUIRE_SLAB=1 it fails where the virtual machine cannot be made.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# The suites take half a minute; an emulated processor on a busy machine needs patience.
TEST_SECONDS_MAX=900
# Most of it is never touched.
DISK_BYTES=$((256 << 20))
# Where the test of a crash marks what was acknowledged: behind its medium.
MARK_AT=$((128 << 20))

prepare Slab "${KVDEPOT_REQUIRE_SLAB:-}" e2fsprogs
build_tests kvdepot-io/volume kvdepot-tier/slab
volume=${binaries[0]} slab=${binaries[1]}
start=$SECONDS
work=$(mktemp -d "$VM_DIR/slab.XXXXXX")
trap 'rm -rf "$work"' EXIT
truncate -s "$DISK_BYTES" "$work/disk" "$work/other"
printf '%s\n' 'pipeline: "Cache|Slab"' 'slab_path: /dev/nvme0n1' 'slab_segment_mb: 8' 'pool_gb: 0.0625' >"$work/depot.yaml"
python=$root/.venv/bin/python

begin='set -euo pipefail
export KVDEPOT_TEST_SLAB=/dev/nvme0n1 RUST_BACKTRACE=0
modprobe -C /dev/null -a nvme ext4
await_disks() {
    local disk tries
    for disk in /dev/nvme0n1 /dev/nvme0n2; do
        for ((tries = 600; tries > 0; tries--)); do [ ! -b $disk ] || continue 2; sleep 0.1; done
        echo "there is no $disk" >&2
        exit 1
    done
}
await_disks
run_test() {
    "$@" --color never --test-threads=1
}
# What kvdepot doctor says of the disk; what else it finds here does not matter.
doctor() {
    { '$python' -m kvdepot doctor --config '$work'/depot.yaml || true; } | grep " medium /dev/nvme0n1: $1"
}
'

# boot STATUS [OPTION...] COMMAND: runs a command in the virtual machine, which must end with this status. What it prints is in
# $work/said, too.
boot() {
    local expected=$1 status=0
    shift
    timeout --kill-after 10 "$TEST_SECONDS_MAX" "$here/run.sh" --nvme "$work/disk:4096" --nvme "$work/other:512" \
        "${@:1:$#-1}" "$begin${*: -1}" | tee "$work/said" || status=$?
    if [ "$status" != "$expected" ]; then
        printf 'the virtual machine ended with %s instead of %s\n' "$status" "$expected" >&2
        exit 1
    fi
}

# The number of blocks that the last boot acknowledged, by its last line that begins with this word.
acknowledged() {
    sed -n "s/^$1 \([0-9]*\)$/\1/p" "$work/said" | tail -n 1 | grep .
}

# The tests of a crash come last: they leave blocks. Before them the disk forgets the rest, so its copies are small.
boot 0 "export KVDEPOT_TEST_SLAB=/dev/nvme0n2
run_test $volume
run_test $slab conformance::slab_is_persistent device::
await_disks
export KVDEPOT_TEST_SLAB=/dev/nvme0n1
mkfs.ext4 -q /dev/nvme0n1
mkdir /run/mounted
mount /dev/nvme0n1 /run/mounted
doctor 'mounted at /run/mounted'
umount /run/mounted
run_test $volume
run_test $slab conformance:: device::
blkdiscard /dev/nvme0n1
run_test $slab crash::
KVDEPOT_TEST_SLAB_ACKNOWLEDGED=0 run_test $slab --exact crash::survivor --nocapture"
kept=$(acknowledged kept)

# After a restart; then the machine is killed in the middle of writes.
cp --sparse=always "$work/disk" "$work/before"
boot 137 --nvme-log "$work/log" --kill-at enough "
KVDEPOT_TEST_SLAB_ACKNOWLEDGED=$kept run_test $slab --exact crash::survivor --nocapture
batches=0
KVDEPOT_TEST_SLAB_CRASH=/dev/nvme0n1 run_test $slab --exact crash::child --nocapture | while IFS= read -r line; do
    echo \"\$line\"
    [[ \$line != written* ]] || ((++batches != 20)) || echo enough
done"
written=$(acknowledged written)

# After losses of power. A medium is its bytes, so a file will do.
moments=0 known=0
python3 "$here/power_loss.py" "$work/log" "$work/before" "$MARK_AT" 12 >"$work/moments"
while read -r file blocks; do
    KVDEPOT_TEST_SLAB=$file KVDEPOT_TEST_SLAB_ACKNOWLEDGED=$blocks \
        "$slab" --exact crash::survivor --nocapture --color never --quiet
    ((++moments))
    known=$blocks
    rm "$file"
done <"$work/moments"
if ((moments < 12 || known <= kept)); then
    printf 'the log of the disk has %d moments, and %d blocks at the last one\n' "$moments" "$known" >&2
    exit 1
fi

# After the kill: the blocks, and what the commands find. Then the medium is given up as docs/operate.md says.
boot 0 "KVDEPOT_TEST_SLAB_ACKNOWLEDGED=$written run_test $slab --exact crash::survivor --nocapture
doctor 'a block device of 0.25 GiB, formatted for 0.12 GiB'
namespace=\$($python -m kvdepot namespaces --medium /dev/nvme0n1 --json | grep -o '[0-9a-f]\{32\}' | head -n 1)
$python -m kvdepot ls \$namespace --medium /dev/nvme0n1 --limit 1 | cat
$python -m kvdepot verify --medium /dev/nvme0n1 2>&1 | cat
for at in 0 255; do dd if=/dev/zero of=/dev/nvme0n1 bs=1M count=1 seek=\$at conv=fsync status=none; done
doctor 'a block device of 0.25 GiB, empty'
KVDEPOT_TEST_SLAB_ACKNOWLEDGED=0 run_test $slab --exact crash::survivor --nocapture"
[ "$(acknowledged kept)" = 0 ] || { echo "a medium that was given up still has blocks" >&2 && exit 1; }
printf 'blocks acknowledged before the restart: %d, before the kill: %d; losses of power: %d\n' "$kept" "$written" "$moments"
printf 'virtual machine ran: %d s\n' $((SECONDS - start))
