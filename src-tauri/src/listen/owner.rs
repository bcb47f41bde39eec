//! Who holds a port.

/// Who listens on `port` on any address: `ollama (pid 812)`. `None` where the system does not
/// tell: another user's process, or not Linux.
pub fn port_owner(port: u16) -> Option<String> {
    #[cfg(target_os = "linux")]
    {
        proc_net::listener(port)
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = port;
        None
    }
}

/// Linux says in `/proc/net/tcp` which socket listens, and in each process's folder which
/// sockets it holds.
#[cfg(target_os = "linux")]
mod proc_net {
    use std::collections::BTreeSet;
    use std::fs;

    pub(super) fn listener(port: u16) -> Option<String> {
        let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
        let sockets: BTreeSet<String> = tables
            .iter()
            .filter_map(|table| fs::read_to_string(table).ok())
            .flat_map(|table| listening_sockets(&table, port))
            .map(|inode| format!("socket:[{inode}]"))
            .collect();
        if sockets.is_empty() {
            return None;
        }
        let processes = fs::read_dir("/proc").ok()?.flatten();
        let owners: Vec<String> = processes
            .filter_map(|entry| {
                let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
                let mut files = fs::read_dir(entry.path().join("fd")).ok()?.flatten();
                let holds = files.any(|file| {
                    fs::read_link(file.path())
                        .is_ok_and(|target| target.to_str().is_some_and(|t| sockets.contains(t)))
                });
                if !holds {
                    return None;
                }
                let name = fs::read_to_string(entry.path().join("comm")).ok()?;
                Some(format!("{} (pid {pid})", name.trim_end()))
            })
            .collect();
        (!owners.is_empty()).then(|| owners.join(", "))
    }

    /// The inodes of the sockets that listen on `port`, from one of the kernel's tables.
    pub(super) fn listening_sockets(table: &str, port: u16) -> Vec<u64> {
        const LISTEN: &str = "0A";
        table
            .lines()
            .skip(1)
            .filter_map(|line| {
                // sl, local address, remote address, state, queues, timer, retransmits, uid,
                // timeout, inode
                let fields: Vec<&str> = line.split_whitespace().collect();
                let (_, hex) = fields.get(1)?.rsplit_once(':')?;
                let ours = u16::from_str_radix(hex, 16).ok()? == port;
                let listens = fields.get(3) == Some(&LISTEN);
                (ours && listens).then(|| fields.get(9)?.parse().ok())?
            })
            .collect()
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernels_table_is_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
   0: 0100007F:1CA9 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41321 1 0 100 0\n\
   1: 0100007F:1CA9 0100007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 41399 1 0 20\n\
   2: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41400 1 0 100\n";
        assert_eq!(proc_net::listening_sockets(table, 7337), [41321]);
        assert!(proc_net::listening_sockets(table, 1).is_empty());
    }
}
