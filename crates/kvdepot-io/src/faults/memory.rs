//! A device in memory that keeps an image after every mutation, which is what a crash at that moment would leave.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::device::{Device, DeviceFile, DeviceSpace, DirectAlign, FileStat, ListEntry};
use crate::iobuf::IoBuf;

/// A kind of change to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Nothing yet: the first image.
    Begin,
    /// A file was created.
    Create,
    /// A file was written.
    Write,
    /// A file's bytes were synced.
    SyncData,
    /// A file or directory was renamed.
    Rename,
    /// A file was removed.
    Unlink,
    /// A directory was made.
    MakeDir,
    /// A directory was removed.
    RemoveDir,
    /// A file's time was set.
    SetModified,
    /// A directory was synced: all earlier changes survive a power loss.
    SyncDir,
}

/// What a power loss may leave of a file whose name survived but whose bytes were not synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// No bytes.
    Empty,
    /// The first half.
    Torn,
    /// Its length, all zeros.
    Zeros,
    /// Its length, with the bytes of another file: of one of the same length if there is one, otherwise the first ones
    /// of the longest, and zeros after them.
    Foreign,
    /// The file's earlier bytes, with their earlier length; for a new file, no bytes.
    Before,
    /// The first half as written, the second half as it was before.
    Mixed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    Dir,
    File(u64),
}

#[derive(Clone, Debug)]
struct Inode {
    bytes: Arc<Vec<u8>>,
    modified: SystemTime,
    synced: bool,
    /// The bytes before the last write, unless that was synced.
    before: Option<Arc<Vec<u8>>>,
}

/// The complete content of a device.
#[derive(Clone, Debug)]
pub struct Image {
    /// The last mutation.
    pub mutation: Mutation,
    /// Its path; of a rename, the new name.
    pub path: PathBuf,
    tree: BTreeMap<PathBuf, Node>,
    inodes: HashMap<u64, Inode>,
}

impl Image {
    fn empty() -> Self {
        let (tree, inodes) = (BTreeMap::from([(PathBuf::new(), Node::Dir)]), HashMap::new());
        Self { mutation: Mutation::Begin, path: PathBuf::new(), tree, inodes }
    }

    /// Iterates over all files with their lengths in bytes.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.tree.iter().filter_map(|(path, node)| match node {
            Node::File(id) => Some((path.as_path(), self.inodes.get(id)?.bytes.len() as u64)),
            Node::Dir => None,
        })
    }

    /// Applies a loss to every file that was not synced. Returns the number of such files.
    pub fn lose(&mut self, loss: Loss) -> usize {
        let all = self.inodes.iter().filter(|_| loss == Loss::Foreign);
        let mut files: Vec<(u64, Arc<Vec<u8>>)> =
            all.map(|(id, inode)| (*id, Arc::clone(&inode.bytes))).collect();
        // By number, so that every run takes the same ones.
        files.sort_unstable_by_key(|(id, _)| *id);
        let foreign = |own: u64, len: usize| {
            let others = || files.iter().filter(|(id, _)| *id != own).map(|(_, bytes)| bytes);
            let same = others().find(|bytes| bytes.len() == len).or_else(|| others().max_by_key(|b| b.len()));
            let mut bytes = same.map(|bytes| bytes.to_vec()).unwrap_or_default();
            bytes.resize(len, 0);
            Arc::new(bytes)
        };
        let named: Vec<u64> = self.tree.values().filter_map(|node| node.file()).collect();
        let mut count = 0;
        for id in named {
            let Some(inode) = self.inodes.get_mut(&id).filter(|inode| !inode.synced) else { continue };
            let len = inode.bytes.len();
            inode.bytes = match loss {
                Loss::Empty => Arc::default(),
                Loss::Torn => Arc::new(inode.bytes[..len / 2].to_vec()),
                Loss::Zeros => Arc::new(vec![0; len]),
                Loss::Foreign => foreign(id, len),
                Loss::Before => inode.before.clone().unwrap_or_default(),
                Loss::Mixed => {
                    let before = inode.before.as_deref().map_or(&[][..], Vec::as_slice);
                    let rest = before.get(len / 2..).unwrap_or(&[]);
                    Arc::new([&inode.bytes[..len / 2], rest].concat())
                }
            };
            count += 1;
        }
        count
    }

    /// Gives this image the names of an earlier one: a power loss after the bytes reached the disk and before the names
    /// did. Files without a name at this point keep the bytes that they had in the earlier image.
    pub fn take_names(&mut self, earlier: &Self) {
        self.tree.clone_from(&earlier.tree);
        for (id, inode) in &earlier.inodes {
            self.inodes.entry(*id).or_insert_with(|| inode.clone());
        }
    }

    /// Replaces a part of every name, for example the writer in the names of temporary files.
    pub fn replace_in_names(&mut self, from: &str, to: &str) {
        let renamed = |path: PathBuf| match path.to_str() {
            Some(text) => PathBuf::from(text.replace(from, to)),
            None => path,
        };
        self.tree = std::mem::take(&mut self.tree).into_iter().map(|(p, node)| (renamed(p), node)).collect();
    }

    /// Writes the image into an empty directory of the real file system.
    pub fn write_to(&self, dir: &Path) -> std::io::Result<()> {
        for (path, node) in &self.tree {
            let whole = dir.join(path);
            match node.file().and_then(|id| self.inodes.get(&id)) {
                None => std::fs::create_dir_all(whole)?,
                Some(inode) => {
                    std::fs::write(&whole, &*inode.bytes)?;
                    std::fs::File::options().write(true).open(whole)?.set_modified(inode.modified)?;
                }
            }
        }
        Ok(())
    }
}

impl Node {
    const fn file(&self) -> Option<u64> {
        match self {
            Self::File(id) => Some(*id),
            Self::Dir => None,
        }
    }
}

#[derive(Debug)]
struct Disk {
    now: Image,
    images: Vec<Image>,
    ids: u64,
    bytes_max: Option<u64>,
}

/// A directory in memory. Every mutation takes effect and is recorded as an image in one step.
#[derive(Clone, Debug)]
pub struct MemoryDevice {
    disk: Arc<Mutex<Disk>>,
}

impl Default for MemoryDevice {
    fn default() -> Self {
        Self::from_image(Image::empty())
    }
}

impl MemoryDevice {
    /// Makes a device with the content of an image.
    pub fn from_image(image: Image) -> Self {
        let now = Image { mutation: Mutation::Begin, path: PathBuf::new(), ..image };
        let ids = now.inodes.keys().max().map_or(0, |id| id + 1);
        Self { disk: Arc::new(Mutex::new(Disk { images: vec![now.clone()], now, ids, bytes_max: None })) }
    }

    /// Returns the image after each mutation. The first one is the state before any.
    pub fn images(&self) -> Vec<Image> {
        self.disk.lock().images.clone()
    }

    /// Returns the number of mutations so far.
    pub fn mutations(&self) -> usize {
        self.disk.lock().images.len() - 1
    }

    /// Sets the size of the disk: writes beyond it fail with ENOSPC.
    pub fn set_disk_bytes(&self, bytes: Option<u64>) {
        self.disk.lock().bytes_max = bytes;
    }
}

fn not_found(path: &Path) -> Error {
    Error::new(ErrorKind::NotFound, "nothing has this name in memory").with("path", path.display())
}

fn pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(kvdepot_core::limits::BLOCK_ALIGN_BYTES)
}

impl Disk {
    fn note(&mut self, mutation: Mutation, path: &Path) {
        self.now.mutation = mutation;
        path.clone_into(&mut self.now.path);
        // An open file may have lost its name.
        let named: std::collections::HashSet<u64> = self.now.tree.values().filter_map(Node::file).collect();
        let mut image = self.now.clone();
        image.inodes.retain(|id, _| named.contains(id));
        self.images.push(image);
    }

    fn file(&self, path: &Path) -> Result<u64> {
        match self.now.tree.get(path) {
            Some(Node::File(id)) => Ok(*id),
            Some(Node::Dir) => Err(Error::new(ErrorKind::Corrupt, "a file is no regular file")),
            None => Err(not_found(path)),
        }
    }

    fn make_dir(&mut self, path: &Path) -> Result<()> {
        let above: Vec<PathBuf> = path.ancestors().map(Path::to_owned).collect();
        for path in above.into_iter().rev() {
            match self.now.tree.get(&path) {
                Some(Node::Dir) => {}
                Some(Node::File(_)) => return Err(Error::new(ErrorKind::Io, "not a directory")),
                None => {
                    self.now.tree.insert(path.clone(), Node::Dir);
                    self.note(Mutation::MakeDir, &path);
                }
            }
        }
        Ok(())
    }

    fn has_parent(&self, path: &Path) -> bool {
        path.parent().is_some_and(|parent| self.now.tree.get(parent) == Some(&Node::Dir))
    }

    fn is_empty_dir(&self, path: &Path) -> bool {
        self.now.tree.range(path.to_owned()..).nth(1).is_none_or(|(next, _)| !next.starts_with(path))
    }

    fn rename(&mut self, from: &Path, to: &Path) -> Result<()> {
        let node = *self.now.tree.get(from).filter(|_| self.has_parent(to)).ok_or_else(|| not_found(from))?;
        match (node, self.now.tree.get(to)) {
            (_, None) | (Node::File(_), Some(Node::File(_))) => {}
            (Node::Dir, Some(Node::Dir)) if self.is_empty_dir(to) => {}
            _ => return Err(Error::new(ErrorKind::Io, "a rename over something of another kind")),
        }
        let moved: Vec<PathBuf> =
            self.now.tree.keys().filter(|path| path.starts_with(from)).cloned().collect();
        for path in moved {
            let (Ok(rest), Some(node)) = (path.strip_prefix(from), self.now.tree.remove(&path)) else {
                continue;
            };
            let target = if rest.as_os_str().is_empty() { to.to_owned() } else { to.join(rest) };
            self.now.tree.insert(target, node);
        }
        self.note(Mutation::Rename, to);
        Ok(())
    }

    fn used_bytes(&self) -> u64 {
        self.now.files().map(|(_, bytes)| pages(bytes)).sum()
    }
}

#[derive(Debug)]
struct MemoryFile {
    disk: Arc<Mutex<Disk>>,
    id: u64,
    path: PathBuf,
}

impl DeviceFile for MemoryFile {
    fn read_at(&self, buf: &mut IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let bytes = self.disk.lock().now.inodes.get(&self.id).map(|inode| Arc::clone(&inode.bytes));
        let bytes = bytes.unwrap_or_default();
        let mut rest = bytes.get(usize::try_from(offset).unwrap_or(usize::MAX)..).unwrap_or(&[]);
        let mut came = 0;
        for mut slice in buf.slices_mut(skip) {
            let part = slice.len().min(rest.len());
            slice[..part].copy_from_slice(&rest[..part]);
            rest = &rest[part..];
            came += part;
        }
        Ok(came)
    }

    fn write_at(&self, buf: &IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let new: Vec<u8> = buf.slices(skip).iter().flat_map(|slice| slice.to_vec()).collect();
        let mut disk = self.disk.lock();
        let (used, bytes_max) = (disk.used_bytes(), disk.bytes_max);
        let Some(inode) = disk.now.inodes.get_mut(&self.id) else { return Err(not_found(&self.path)) };
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        let grown = (at + new.len()).saturating_sub(inode.bytes.len()) as u64;
        if bytes_max.is_some_and(|most| used + pages(grown) > most) {
            return Err(super::Faults::no_space());
        }
        let before = Arc::clone(&inode.bytes);
        let bytes = Arc::make_mut(&mut inode.bytes);
        bytes.resize(bytes.len().max(at + new.len()), 0);
        bytes[at..at + new.len()].copy_from_slice(&new);
        (inode.synced, inode.modified) = (false, SystemTime::now());
        // What the disk holds until these bytes are written back.
        inode.before = Some(before);
        disk.note(Mutation::Write, &self.path);
        Ok(new.len())
    }

    fn sync_data(&self) -> Result<()> {
        let mut disk = self.disk.lock();
        if let Some(inode) = disk.now.inodes.get_mut(&self.id) {
            (inode.synced, inode.before) = (true, None);
        }
        disk.note(Mutation::SyncData, &self.path);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        Ok(())
    }

    fn go_direct_if_cold(&self, _bytes: u64) -> bool {
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

impl Device for MemoryDevice {
    fn root(&self) -> &Path {
        Path::new("memory")
    }

    fn direct(&self) -> Option<DirectAlign> {
        None
    }

    fn direct_when_cold(&self) -> Option<DirectAlign> {
        None
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn open(&self, path: &Path, _direct: bool) -> Result<Box<dyn DeviceFile>> {
        let id = self.disk.lock().file(path)?;
        Ok(Box::new(MemoryFile { disk: Arc::clone(&self.disk), id, path: path.to_owned() }))
    }

    fn create(&self, path: &Path, _direct: bool) -> Result<Box<dyn DeviceFile>> {
        let mut disk = self.disk.lock();
        disk.make_dir(path.parent().unwrap_or_else(|| Path::new("")))?;
        if disk.now.tree.contains_key(path) {
            return Err(Error::new(ErrorKind::Io, "the name is taken").with("path", path.display()));
        }
        let id = disk.ids;
        disk.ids += 1;
        let inode = Inode { bytes: Arc::default(), modified: SystemTime::now(), synced: false, before: None };
        disk.now.inodes.insert(id, inode);
        disk.now.tree.insert(path.to_owned(), Node::File(id));
        disk.note(Mutation::Create, path);
        Ok(Box::new(MemoryFile { disk: Arc::clone(&self.disk), id, path: path.to_owned() }))
    }

    fn overwrites(&self) -> bool {
        true
    }

    fn take_over(
        &self,
        from: &Path,
        to: &Path,
        bytes: u64,
        _direct: bool,
    ) -> Result<Option<Box<dyn DeviceFile>>> {
        let mut disk = self.disk.lock();
        disk.rename(from, to)?;
        let id = disk.file(to)?;
        if disk.now.inodes.get(&id).is_some_and(|inode| inode.bytes.len() as u64 == bytes) {
            return Ok(Some(Box::new(MemoryFile { disk: Arc::clone(&self.disk), id, path: to.to_owned() })));
        }
        disk.now.tree.remove(to);
        disk.note(Mutation::Unlink, to);
        Ok(None)
    }

    fn publish(&self, from: &Path, to: &Path) -> Result<()> {
        self.disk.lock().rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<bool> {
        let mut disk = self.disk.lock();
        if disk.now.tree.contains_key(to) || !disk.now.tree.contains_key(from) {
            return Ok(false);
        }
        disk.rename(from, to).map(|()| true)
    }

    fn link_new(&self, from: &Path, to: &Path) -> Result<bool> {
        let mut disk = self.disk.lock();
        let id = disk.file(from)?;
        match disk.now.tree.get(to) {
            Some(node) => return Ok(node.file() == Some(id)),
            None if !disk.has_parent(to) => return Err(not_found(to)),
            None => {}
        }
        disk.now.tree.insert(to.to_owned(), Node::File(id));
        disk.note(Mutation::Rename, to);
        Ok(true)
    }

    fn unlink(&self, path: &Path) -> Result<bool> {
        let mut disk = self.disk.lock();
        match disk.now.tree.get(path) {
            None => return Ok(false),
            Some(Node::Dir) => return Err(Error::new(ErrorKind::Io, "a directory is not unlinked")),
            Some(Node::File(_)) => {}
        }
        disk.now.tree.remove(path);
        disk.note(Mutation::Unlink, path);
        Ok(true)
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        let disk = self.disk.lock();
        let modified = SystemTime::UNIX_EPOCH;
        Ok(disk.now.tree.get(path).map(|node| match node.file().and_then(|id| disk.now.inodes.get(&id)) {
            Some(inode) => {
                FileStat { bytes: inode.bytes.len() as u64, modified: inode.modified, is_dir: false }
            }
            None => FileStat { bytes: 0, modified, is_dir: true },
        }))
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(ListEntry)) -> Result<()> {
        let entries: Vec<ListEntry> = {
            let disk = self.disk.lock();
            let here = disk.now.tree.iter().filter(|(entry, _)| entry.parent() == Some(path));
            let named = here.filter_map(|(entry, node)| {
                let name = entry.file_name()?.to_str()?.to_owned();
                Some(ListEntry { name, is_dir: *node == Node::Dir })
            });
            named.collect()
        };
        entries.into_iter().for_each(each);
        Ok(())
    }

    fn make_dir(&self, path: &Path) -> Result<()> {
        self.disk.lock().make_dir(path)
    }

    fn create_dir(&self, path: &Path) -> Result<bool> {
        let mut disk = self.disk.lock();
        if disk.now.tree.contains_key(path) {
            return Ok(false);
        }
        if !disk.has_parent(path) {
            return Err(not_found(path));
        }
        disk.make_dir(path).map(|()| true)
    }

    fn remove_dir(&self, path: &Path) -> Result<bool> {
        let mut disk = self.disk.lock();
        if disk.now.tree.get(path) != Some(&Node::Dir) || !disk.is_empty_dir(path) {
            return Ok(false);
        }
        disk.now.tree.remove(path);
        disk.note(Mutation::RemoveDir, path);
        Ok(true)
    }

    fn set_modified(&self, path: &Path, time: SystemTime) -> Result<()> {
        let mut disk = self.disk.lock();
        let id = disk.file(path)?;
        if let Some(inode) = disk.now.inodes.get_mut(&id) {
            inode.modified = time;
        }
        disk.note(Mutation::SetModified, path);
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        self.disk.lock().note(Mutation::SyncDir, path);
        Ok(())
    }

    fn space(&self) -> Result<DeviceSpace> {
        let disk = self.disk.lock();
        let (used_bytes, total_bytes) = (disk.used_bytes(), disk.bytes_max.unwrap_or(1 << 40));
        let free_bytes = total_bytes.saturating_sub(used_bytes);
        Ok(DeviceSpace { file_system: 0, total_bytes, used_bytes, free_bytes })
    }

    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>> {
        let disk = self.disk.lock();
        let id = match disk.file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            id => id?,
        };
        let bytes = disk.now.inodes.get(&id).map(|inode| inode.bytes.to_vec()).unwrap_or_default();
        if bytes.len() > bytes_max {
            return Err(Error::new(ErrorKind::Corrupt, "a file is longer than it may be"));
        }
        Ok(Some(bytes))
    }

    /// Writes in single steps, with an image after each.
    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()> {
        let slot = crate::SlotBuf::anonymous(bytes.len().max(1));
        slot.write_at(0, bytes);
        let file = self.create(temporary, false)?;
        let buf = IoBuf::payload(slot, bytes.len())
            .ok_or_else(|| Error::new(ErrorKind::Io, "a small file does not fit its buffer"))?;
        let written = file.write_at(&buf, 0, 0).and_then(|_| file.sync_data());
        let published = written.and_then(|()| self.publish(temporary, path));
        if published.is_err() {
            let _ = self.unlink(temporary);
        }
        published
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DirDevice, DirectUse};

    fn names(device: &dyn Device, path: &str) -> Vec<(String, bool)> {
        let mut out = Vec::new();
        device.list(Path::new(path), &mut |entry| out.push((entry.name, entry.is_dir))).unwrap();
        out.sort();
        out
    }

    /// Returns the answers of every call, to compare the device in memory with a directory.
    fn story(device: &dyn Device) -> Vec<String> {
        let (a, b, sub) = (Path::new("d/a"), Path::new("d/b"), Path::new("d/sub"));
        let mut out = vec![
            format!("{:?}", device.unlink(a).map_err(|e| e.kind())),
            format!("{:?}", device.create_dir(sub).map_err(|e| e.kind())),
            format!("{:?}", device.publish(a, b).map_err(|e| e.kind())),
        ];
        device.create(a, false).unwrap();
        out.extend([
            format!("{:?}", device.create(a, false).map(drop).map_err(|e| e.kind())),
            format!("{:?}", device.create_dir(sub)),
            format!("{:?}", device.create_dir(sub)),
            format!("{:?}", device.remove_dir(Path::new("d"))),
            format!("{:?}", device.unlink(sub).is_err()),
            format!("{:?}", device.publish(a, sub).is_err()),
            format!("{:?}", device.open(sub, false).map(drop).map_err(|e| e.kind())),
            format!("{:?}", device.rename_new(a, b)),
            format!("{:?}", device.rename_new(a, b)),
        ]);
        device.write_small(a, Path::new("d/.tmp"), b"12345").unwrap();
        out.extend([
            format!("{:?}", device.publish(a, b)),
            format!("{:?}", device.read_small(b, 10)),
            format!("{:?}", device.read_small(a, 10)),
            format!("{:?}", device.read_small(b, 4).map_err(|e| e.kind())),
            format!("{:?}", device.stat(b).unwrap().map(|stat| (stat.bytes, stat.is_dir))),
            format!("{:?}", device.rename_new(sub, Path::new("d/other"))),
            format!("{:?}", device.remove_dir(Path::new("d/other"))),
            format!("{:?}", (names(device, "d"), names(device, "nowhere"), names(device, ""))),
        ]);
        out
    }

    #[test]
    fn memory_answers_as_a_directory_does() {
        let dir = tempfile::tempdir().unwrap();
        let real = DirDevice::open(dir.path(), DirectUse::Never).unwrap();
        let memory = MemoryDevice::default();
        assert_eq!(story(&memory), story(&real));
        let copy = tempfile::tempdir().unwrap();
        memory.images().last().unwrap().write_to(copy.path()).unwrap();
        assert_eq!(std::fs::read(copy.path().join("d/b")).unwrap(), b"12345");
    }

    #[test]
    fn an_image_loses_what_was_not_synced() {
        let device = MemoryDevice::default();
        device.write_small(Path::new("kept"), Path::new(".tmp"), b"12345").unwrap();
        let file = device.create(Path::new("lost"), false).unwrap();
        let slot = crate::SlotBuf::anonymous(8);
        file.write_at(&IoBuf::payload(slot, 8).unwrap(), 0, 0).unwrap();
        let mut image = device.images().pop().unwrap();
        assert_eq!(image.lose(Loss::Torn), 1);
        let files: Vec<_> = image.files().map(|(path, bytes)| (path.to_owned(), bytes)).collect();
        assert_eq!(files, [(PathBuf::from("kept"), 5), (PathBuf::from("lost"), 4)]);
        assert_eq!(device.mutations(), 6, "create, write, sync, rename, create, write");
    }
}
