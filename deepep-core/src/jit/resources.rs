//! What the assembler said about a kernel.

/// Registers and memory that one kernel uses, as the assembler reported them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Name of the kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory a thread's stack takes.
    pub stack: u32,
    /// Bytes stored to local memory for want of registers.
    pub spill_stores: u32,
    /// Bytes loaded back.
    pub spill_loads: u32,
}

impl Resources {
    /// Whether the kernel uses no local memory at all.
    pub fn in_registers(&self) -> bool {
        self.stack == 0 && self.spill_stores == 0 && self.spill_loads == 0
    }

    /// Reads the assembler's verbose report: one entry for each kernel it names. Functions that a kernel calls count with it.
    pub(super) fn parse(log: &str) -> Vec<Self> {
        let mut kernels: Vec<Self> = Vec::new();
        for line in log.lines() {
            if let Some(name) =
                line.split_once("entry function '").and_then(|(_, rest)| rest.split_once('\''))
            {
                kernels.push(Self { kernel: name.0.to_owned(), ..Self::default() });
                continue;
            }
            let Some(kernel) = kernels.last_mut() else { continue };
            let before = |what: &str| -> Option<u32> {
                let words = line.split_once(what)?.0;
                words.trim_end().rsplit([' ', '\t', ',']).next()?.parse().ok()
            };
            if let Some(n) = before("bytes stack frame") {
                kernel.stack = kernel.stack.max(n);
            }
            if let Some(n) = before("bytes spill stores") {
                kernel.spill_stores += n;
            }
            if let Some(n) = before("bytes spill loads") {
                kernel.spill_loads += n;
            }
            if let Some(n) = before("registers") {
                kernel.registers = n;
            }
        }
        kernels
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_report() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
                   ptxas info    : Function properties for a\n\
                   ptxas         .     256 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 256 bytes cumulative stack size\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
                   ptxas info    : Function properties for b\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Function properties for called\n\
                   ptxas         .     16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n\
                   ptxas info    : Used 7 registers\n";
        let all = Resources::parse(log);
        assert_eq!(
            all[0],
            Resources { kernel: "a".into(), registers: 32, stack: 256, spill_stores: 8, spill_loads: 12 }
        );
        assert!(!all[0].in_registers());
        assert_eq!((all[1].kernel.as_str(), all[1].registers, all[1].stack), ("b", 7, 16));
        assert_eq!((all[1].spill_stores, all[1].spill_loads, all[1].in_registers()), (4, 4, false));
        assert!(Resources::parse("no report").is_empty());
    }
}
