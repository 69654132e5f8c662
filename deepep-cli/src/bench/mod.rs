//! What `deepep bench` is made of: ceilings of the hardware, a plan, ranks that verify and time, and a report.

pub mod ceilings;
pub mod machine;
pub mod plan;
pub mod report;
pub mod stats;
pub mod svg;
