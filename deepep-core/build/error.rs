//! The crate's error, as far as the modules know it that this script shares with the crate. Nothing here makes one: layouts are not computed.

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug)]
pub(crate) struct Error(#[allow(dead_code)] String);

impl Error {
    #[allow(dead_code)]
    pub(crate) fn invalid(
        parameter: &'static str,
        value: impl ToString,
        requirement: impl Into<String>,
    ) -> Self {
        Self(format!("{parameter} = {}: {}", value.to_string(), requirement.into()))
    }
}
