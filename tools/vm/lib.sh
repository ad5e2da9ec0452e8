# What the tests in the virtual machine share; they source it. Makes what they need by itself: Debian packages (as root),
# a kernel, an initial file system; kept under .work/vm.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export VM_DIR=${VM_DIR:-$root/.work/vm}

# prepare NAME REQUIRED PACKAGE...: makes the virtual machine, one caller at a time, since `.ci/run` has tests side by side.
# Where that cannot be, says why and ends with success; with a REQUIRED that is not empty, with failure.
prepare() {
    local name=$1 required=$2 start=$SECONDS reason
    shift 2
    mkdir -p "$VM_DIR"
    if ! reason=$(flock "$VM_DIR" "$here/setup.sh" "$@" 2>&1 >/dev/null | tail -n 1); then
        printf 'SKIPPED: %s tests did not run: %s\n' "$name" "${reason:-setup failed}" >&2
        [ -z "$required" ] || exit 1
        exit 0
    fi
    printf 'virtual machine ready: %d s\n' $((SECONDS - start))
}

# unpack NAME PACKAGE...: unpacks Debian packages and what they need beyond this machine's own packages under
# $VM_DIR/NAME/root, for programs that only the guest shall have: nothing is installed, and no service starts here. The
# last line on standard error says what is missing.
unpack() {
    local at=$VM_DIR/$1 package
    shift
    [ ! -e "$at/ready" ] || return 0
    rm -rf "$at"
    mkdir -p "$at/archives/partial" "$at/root"
    apt-get install -qq -y --download-only --no-install-recommends -o Dir::Cache::archives="$at/archives" \
        -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" "$@" >/dev/null 2>&1 || {
        echo "packages cannot be downloaded: $*" >&2
        return 1
    }
    for package in "$at"/archives/*.deb; do
        # None if all of them are installed.
        [ ! -e "$package" ] || dpkg -x "$package" "$at/root"
    done
    rm -rf "$at/archives"
    touch "$at/ready"
}

# prepare_nfs [PACKAGE...]: makes the virtual machine, and what an NFS server and its clients need in it. Where that cannot be,
# it ends as `prepare` does.
prepare_nfs() {
    local reason
    prepare NFS "${KVDEPOT_REQUIRE_NFS:-}" iproute2 e2fsprogs "$@"
    if ! reason=$(unpack nfs nfs-kernel-server quota 2>&1 >/dev/null | tail -n 1) || [ -n "$reason" ]; then
        printf 'SKIPPED: NFS tests did not run: %s\n' "$reason" >&2
        [ -z "${KVDEPOT_REQUIRE_NFS:-}" ] || exit 1
        exit 0
    fi
}

# nfs_programs: commands for the guest that make what `prepare_nfs` has unpacked its own.
nfs_programs() {
    local nfs=$VM_DIR/nfs/root
    echo "export PATH=\$PATH:$nfs/sbin:$nfs/usr/sbin:$nfs/usr/bin"
    echo "export LD_LIBRARY_PATH=$nfs/usr/lib/x86_64-linux-gnu:$nfs/lib/x86_64-linux-gnu"
}

# on_nfs_mount MEMORY_MIB SECONDS COMMAND: runs a command in the repository's root in a virtual machine of so much memory, with
# an NFS server that has 1 GiB, and its mount at /mnt/test. Returns the command's status.
on_nfs_mount() {
    local start=$SECONDS status=0
    timeout --kill-after 10 "$2" "$here/run.sh" --memory "$1" "
$(nfs_programs)
export PYTHONPATH=${PYTHONPATH:-}
source $here/nfs_guest.sh
make_disk kv 1G
make_node a 1
serve
mkdir -p /mnt/test
# As docs/deploy.md recommends.
/run/on-a mount.nfs 10.77.1.1:/kv /mnt/test -o vers=4.2,lookupcache=positive
cd $root
$3
" || status=$?
    printf 'virtual machine ran: %d s\n' $((SECONDS - start))
    return "$status"
}

# build_tests CRATE/TEST...: builds integration tests; puts the paths of their binaries into the array `binaries`, in this
# order.
build_tests() {
    local start=$SECONDS options=() wanted paths
    for wanted in "$@"; do options+=(--test "${wanted#*/}"); done
    # With the features that `make test-rust` builds with, those of the whole workspace: what that has built is used again.
    paths=$(cd "$root" && cargo test --quiet --workspace "${options[@]}" --no-run --message-format=json |
        python3 -c '
import json, pathlib, sys
found = dict.fromkeys(sys.argv[1:])
for message in map(json.loads, sys.stdin):
    if message.get("executable"):
        name = pathlib.Path(message["manifest_path"]).parent.name + "/" + message["target"]["name"]
        if name in found:
            found[name] = message["executable"]
if missing := [name for name, path in found.items() if path is None]:
    sys.exit(f"not built: {missing}")
print(*found.values(), sep="\n")' "$@")
    mapfile -t binaries <<<"$paths"
    printf 'tests built: %d s\n' $((SECONDS - start))
}
