//! Who moves what where: the memory of all devices, and the transfers between them.

use super::Transfer;

/// Addresses of each device's memory.
#[derive(Clone, Debug)]
pub struct Boxes {
    /// What peers write.
    pub inboxes: Vec<u64>,
    /// What peers read.
    pub outboxes: Vec<u64>,
    /// Bytes of each.
    pub bytes: u64,
    /// Counters of vectors that differ.
    pub wrong: Vec<u64>,
    /// Counters of waits that gave up.
    pub late: Vec<u64>,
    /// Counters of kernels that exchange packets: of each kind, and of each of [`EPOCH_BLOCKS`](super::EPOCH_BLOCKS) blocks.
    pub epochs: Vec<u64>,
    /// The deadline of kernels.
    pub timeout_ns: u64,
}

/// Rows that a device moves to or from each of its targets, and their contents.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// How many.
    pub rows: u64,
    /// Bytes of each.
    pub row_bytes: u32,
    /// Changes the contents.
    pub round: u32,
    /// Warps that store; 0 if rows are stored in order.
    pub slots: u32,
}

impl Boxes {
    /// Number of devices.
    pub fn devices(&self) -> usize {
        self.inboxes.len()
    }

    /// What goes to one peer, or with one device to itself.
    pub fn part_bytes(&self) -> u64 {
        let parts = (self.devices() as u64 - 1).max(1);
        self.bytes / parts / 4096 * 4096
    }

    /// Where the device finds the part of its peer at a distance that is its own.
    fn part(&self, distance: usize) -> u64 {
        (self.devices() - 1 - distance) as u64 * self.part_bytes()
    }

    /// From a device to all its peers' inboxes, in order of distance.
    pub fn to_peers(&self, device: usize, rows: Rows) -> Transfer {
        let n = self.devices();
        let targets: Vec<u64> = (1..n).map(|d| self.inboxes[(device + d) % n] + self.part(d)).collect();
        self.transfer(device, &targets, rows)
    }

    /// From all peers' outboxes to a device.
    pub fn from_peers(&self, device: usize, rows: Rows) -> Transfer {
        let n = self.devices();
        let targets: Vec<u64> = (1..n).map(|d| self.outboxes[(device + d) % n]).collect();
        self.transfer(device, &targets, rows)
    }

    /// To a device's own inbox, from its outbox if the kernel reads.
    pub fn to_own(&self, device: usize, rows: Rows) -> Transfer {
        self.transfer(device, &[self.inboxes[device]], rows)
    }

    /// Into a device's outbox.
    pub fn fill(&self, device: usize, rows: Rows) -> Transfer {
        self.transfer(device, &[self.outboxes[device]], rows)
    }

    /// What finds out whether a device has received what [`to_own`](Self::to_own) sent.
    pub fn check_own(&self, device: usize, rows: Rows) -> Transfer {
        self.to_own(device, rows)
    }

    /// What finds out whether a device has received what [`to_peers`](Self::to_peers) of all its peers sent.
    pub fn check_peers(&self, device: usize, rows: Rows) -> Vec<Transfer> {
        let n = self.devices();
        let check = |d: usize| {
            let mut transfer = self.transfer(device, &[self.inboxes[device] + self.part(d)], rows);
            // The sender at this distance had it as its target number d − 1 of n − 1.
            (transfer.which, transfer.targets) = (d as u32 - 1, n as u32 - 1);
            transfer
        };
        (1..n).map(check).collect()
    }

    pub(super) fn transfer(&self, device: usize, targets: &[u64], rows: Rows) -> Transfer {
        let mut target = [0; 8];
        target[..targets.len()].copy_from_slice(targets);
        Transfer {
            target,
            source: self.outboxes[device],
            rows: rows.rows,
            wrong: self.wrong[device],
            late: self.late[device],
            timeout_ns: self.timeout_ns,
            targets: targets.len() as u32,
            row_bytes: rows.row_bytes,
            round: rows.round,
            compare: 0,
            slots: rows.slots,
            which: 0,
        }
    }
}
