#!/usr/bin/env bash
# Measures the Posix tier beside fio and, if `make ucm-env` has installed it, UCM in a virtual machine: on a real NFS mount,
# then in the directory that the server exports. Its processor is emulated: ratios count.
# usage: nfs_rates.sh [OPTION...], options of benches.peers
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

export KVDEPOT_REQUIRE_NFS=1
prepare_nfs fio
options=''
[ $# = 0 ] || printf -v options '%q ' "$@"
memory_mib=4096
# UCM has a buffer of 4,096 blocks at least.
[ ! -x "$root/.venv-ucm/bin/python" ] || memory_mib=14336
on_nfs_mount "$memory_mib" 7200 "
for directory in /mnt/test /srv/kv; do
    echo \"== \$directory\"
    .venv/bin/python -m benches.peers --only files --directory \$directory $options 2>&1 | cat
done
"
