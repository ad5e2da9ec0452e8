#!/bin/busybox sh
# First process of the guest: from the initial file system into the host's root directory, then the command.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
while read -r module; do $b insmod "/modules/$module"; done </modules/order
fs=trans=virtio,version=9p2000.L,msize=512000
$b mount -t 9p -o $fs,cache=loose,ro hostroot /lower
$b mount -t tmpfs -o size=50%,mode=755 tmpfs /upper
$b mkdir /upper/files /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /new
for dir in dev proc sys; do $b mount --move /$dir /new/$dir; done
$b mount -t tmpfs tmpfs /new/run
$b mkdir -p /new/dev/shm /new/share /new/lib/modules
$b mount -t tmpfs tmpfs /new/dev/shm
$b mount -t 9p -o $fs,cache=none share /new/share
modules=$($b sed -n 's/.*modules=\([^ ]*\).*/\1/p' /new/proc/cmdline)
$b mount --bind "/new$modules" /new/lib/modules
exec $b switch_root /new /bin/bash /share/guest.sh
