# Sourced in the virtual machine: an NFS server in the first network namespace, and two nodes, `a` and `b`, each with its
# network namespace and host name. So each node has an NFS client of its own: another superblock, page cache and cache of
# attributes.
set -euo pipefail

# The calibration of the other clock is wrong when the machine that emulates it is busy: time ran at twice its speed.
echo hpet >/sys/devices/system/clocksource/clocksource0/current_clocksource
mount -t tmpfs tmpfs /srv
for module in ext4 loop quota_v2 veth nfsd nfsv3 nfsv4; do modprobe -C /dev/null "$module"; done

# make_disk NAME BYTES: an ext4 file system of this size on /srv/NAME, with quotas of users. No journal, and no waiting for
# the disk below: its survival of a power loss is not what is tested.
make_disk() {
    mkdir -p "/run/disks" "/srv/$1"
    truncate -s "$2" "/run/disks/$1"
    mkfs.ext4 -q -m 0 -O quota,^has_journal -E quotatype=usrquota,nodiscard,lazy_itable_init=1 "/run/disks/$1"
    mount -o loop,usrquota "/run/disks/$1" "/srv/$1"
}

# make_node NAME NUMBER: a network namespace that reaches the server at 10.77.NUMBER.1.
make_node() {
    ip netns add "$1"
    ip link add "to-$1" type veth peer name eth0 netns "$1"
    ip addr add "10.77.$2.1/24" dev "to-$1"
    ip link set "to-$1" up
    ip -n "$1" addr add "10.77.$2.2/24" dev eth0
    ip -n "$1" link set eth0 up
    ip -n "$1" link set lo up
    touch "/run/uts-$1"
    unshare --uts="/run/uts-$1" hostname "node-$1"
    printf '#!/bin/sh\nexec nsenter --net=/run/netns/%s --uts=/run/uts-%s "$@"\n' "$1" "$1" >"/run/on-$1"
    chmod +x "/run/on-$1"
}

# serve: exports what lies below /srv, for versions 3 and 4. The times are the shortest that the kernel takes: a server that
# comes back lets its clients open files after the second one.
serve() {
    grep -q '^_rpc:' /etc/passwd || echo '_rpc:x:150:65534::/run/rpcbind:/usr/sbin/nologin' >>/etc/passwd
    mkdir -p /run/rpcbind /var/lib/nfs/v4recovery
    touch /var/lib/nfs/etab /var/lib/nfs/rmtab
    mount -t nfsd nfsd /proc/fs/nfsd
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    local path id=0 options=rw,async,no_root_squash,no_subtree_check
    # The root of version 4; the layer of memory below / cannot be exported.
    exportfs -i -o "$options,fsid=0,crossmnt" '*:/srv'
    for path in /srv/*; do exportfs -i -o "$options,fsid=$((++id))" "*:$path"; done
    rpcbind
    rpc.mountd
    rpc.nfsd 8
    # No client has anything to reclaim.
    { echo Y >/proc/fs/nfsd/v4_end_grace; } 2>/dev/null || true
}

# mount_on NODE NUMBER EXPORT VERSION [OPTIONS]: mounts an export at /mnt/EXPORT-NODE, of version 3 at /mnt/EXPORT-NODE-3.
mount_on() {
    local path="/$3" at="/mnt/$3-$1" options="vers=$4${5:+,$5}"
    if [ "$4" = 3 ]; then path="/srv/$3" at+=-3 options+=,nolock; fi
    mkdir -p "$at"
    "/run/on-$1" mount.nfs "10.77.$2.1:$path" "$at" -o "$options"
}
