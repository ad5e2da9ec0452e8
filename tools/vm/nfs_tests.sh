# Sourced in the virtual machine of nfs.sh after nfs_guest.sh: what runs on the mounts.
export RUST_BACKTRACE=0 KVDEPOT_TEST_PATIENCE_S=600

run_test() {
    local began=$SECONDS
    "$@" --color never
    printf '== %s: %d s\n' "${1##*/}" $((SECONDS - began))
}

make_disk kv 512M
make_disk full 8M
make_node a 1
make_node b 2
serve
# As docs/deploy.md recommends.
mount_on a 1 kv 4.2 lookupcache=positive
mount_on b 2 kv 4.2 lookupcache=positive
# These remember which names were missing, for a few seconds.
mount_on a 1 kv 3 acdirmin=3,acdirmax=6
mount_on b 2 kv 3 acdirmin=3,acdirmax=6
mount_on a 1 full 4.2
make_node soft 3
mount_on soft 3 kv 4.2 soft,timeo=20,retrans=1

# Two clients: another device number, and what one of them has read is in its page cache alone.
head -c 1M /dev/zero >/mnt/kv-a/page
cat /mnt/kv-b/page >/dev/null
cached() { fincore --noheadings --raw --bytes --output RES "$1"; }
echo 3 >/proc/sys/vm/drop_caches
cat /mnt/kv-b/page >/dev/null
[ "$(stat -c %d /mnt/kv-a/page)" != "$(stat -c %d /mnt/kv-b/page)" ]
[ "$(cached /mnt/kv-a/page)" = 0 ]
[ "$(cached /mnt/kv-b/page)" = 1048576 ]

on_4=/mnt/kv-a:/run/on-a,/mnt/kv-b:/run/on-b
on_3=/mnt/kv-a-3:/run/on-a,/mnt/kv-b-3:/run/on-b

# capped_storm PROGRAM NODES: kills processes of both nodes while what lies at the server is measured.
capped_storm() {
    KVDEPOT_TEST_KILLS=$capped_kills KVDEPOT_TEST_NODES=$2 KVDEPOT_TEST_SERVER_DIR=/srv/kv run_test "$1" --nocapture \
        --exact killed_nodes_keep_one_cap_and_leave_nothing
}

# depot_storm PROGRAM KILLS: the same with real depots.
depot_storm() {
    (cd "$here/../.." && "$python" -m tools.vm.nfs_storm --server /srv/kv --sampler "$1" --kills "$2" ${on_4//,/ })
}

if [ -n "$short" ]; then
    echo "== two nodes"
    KVDEPOT_TEST_NODES_FRESH=1 KVDEPOT_TEST_NODES=$on_4 run_test "${binaries[0]}" --nocapture --test-threads=4
    "$python" "$here/nfs_depot.py" /mnt/kv-a /mnt/kv-b
    echo "== one cap for both nodes, killed over and over"
    capped_storm "${binaries[1]}" "$on_4"
    depot_storm "${binaries[1]}" 2
    exit 0
fi

echo "== conformance: psync, aio, io_uring; O_DIRECT never, for cold reads, and always"
names=(posix_shared posix_of_its_own_buffered_durable_and_flat posix_by_aio_direct posix_by_io_uring_direct)
[ -z "$long" ] || names=(posix)
KVDEPOT_TEST_DIR=/mnt/kv-a run_test "${binaries[0]}" --test-threads=2 "${names[@]}"

echo "== two nodes"
KVDEPOT_TEST_NODES=$on_3 run_test "${binaries[1]}" --nocapture --test-threads=4
KVDEPOT_TEST_NODES_FRESH=1 KVDEPOT_TEST_NODES=$on_4 run_test "${binaries[1]}" --nocapture --test-threads=4
for nodes in "$on_3" "$on_4"; do
    KVDEPOT_TEST_KILLS=$kills KVDEPOT_TEST_NODES=$nodes run_test "${binaries[4]}" --nocapture \
        --exact both_nodes_are_killed_over_and_over
done

echo "== one cap for both nodes, measured at the server"
for nodes in "$on_4" "$on_3"; do
    KVDEPOT_TEST_NODES=$nodes KVDEPOT_TEST_SERVER_DIR=/srv/kv run_test "${binaries[3]}" --nocapture --test-threads=2 \
        processes_that_are_killed_keep_one_cap a_process_that_is_stopped_and_continued_keeps_the_cap \
        the_grant_of_a_killed_process_returns
    capped_storm "${binaries[4]}" "$nodes"
done
depot_storm "${binaries[4]}" 6
echo "== one cap on a mount"
KVDEPOT_TEST_DIR=/mnt/kv-a run_test "${binaries[3]}" --test-threads=4 --skip processes_that_are --skip a_process_that_is \
    --skip the_grant_of

echo "== a full server, then a used-up quota"
# One after another: they share the space.
full=(--include-ignored --nocapture --test-threads=1)
KVDEPOT_TEST_SMALL_DIR=/mnt/full-a run_test "${binaries[2]}" "${full[@]}"
mkdir /mnt/kv-a/quota
chown 1000 /mnt/kv-a/quota
setquota -u 1000 0 6144 0 0 /srv/kv
KVDEPOT_TEST_SMALL_DIR=/mnt/kv-a/quota run_test setpriv --reuid 1000 --clear-groups "${binaries[2]}" "${full[@]}" \
    by_psync

echo "== depots through an outage"
"$python" "$here/nfs_depot.py" --stop "rpc.nfsd 0" --start "rpc.nfsd 8" --outage-s "$outage_s" /mnt/kv-a /mnt/kv-soft
