//! How a communicator is set up.

use crate::bytes::Bytes;
use crate::error::{Error, Result};
use nccl_gin_sys::{Generation, NCCL_API_MAGIC, Nccl, ncclConfig_t, v2_32};
use std::ffi::CString;
use std::mem::offset_of;
use std::ptr;
use std::time::Duration;

/// How a communicator is set up: a builder for `ncclConfig_t`, and how long its operations may take.
///
/// What is not set is left to NCCL. Every communicator of this crate is a non-blocking one for NCCL, so that a wait for another rank can
/// end; the methods that wait do so for at most [`Config::timeout`].
#[derive(Clone, Debug, PartialEq)]
#[doc(alias = "ncclConfig_t")]
#[must_use]
pub struct Config {
    timeout: Duration,
    net: Option<String>,
    name: Option<String>,
    min_ctas: Option<i32>,
    max_ctas: Option<i32>,
    cga_cluster_size: Option<i32>,
    nvls_ctas: Option<i32>,
    channels_per_net_peer: Option<i32>,
    traffic_class: Option<i32>,
    cta_policy: Option<i32>,
    split_share: Option<bool>,
    shrink_share: Option<bool>,
    collnet: Option<bool>,
    nvlink_centric: Option<bool>,
    rma_contexts: Option<i32>,
    max_p2p_peers: Option<i32>,
}

impl Default for Config {
    fn default() -> Self {
        Self::new()
    }
}

/// `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEFINED: i32 = i32::MIN;

/// Defines setters of numbers.
macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
        pub fn $name(mut self, value: u32) -> Self {
            // NCCL counts in C's int and refuses what is out of its own range.
            self.$name = Some(i32::try_from(value).unwrap_or(i32::MAX));
            self
        }
    )* };
}

/// Defines setters of switches.
macro_rules! switches {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
        pub fn $name(mut self, on: bool) -> Self {
            self.$name = Some(on);
            self
        }
    )* };
}

impl Config {
    /// NCCL's defaults, and two minutes for each operation.
    pub const fn new() -> Self {
        Self {
            timeout: Duration::from_secs(120),
            net: None,
            name: None,
            min_ctas: None,
            max_ctas: None,
            cga_cluster_size: None,
            nvls_ctas: None,
            channels_per_net_peer: None,
            traffic_class: None,
            cta_policy: None,
            split_share: None,
            shrink_share: None,
            collnet: None,
            nvlink_centric: None,
            rma_contexts: None,
            max_p2p_peers: None,
        }
    }

    /// How long each operation of the communicator (its creation, a window, a device communicator, closing) may take before it is aborted.
    /// An abort gives the rank its resources back; the communicator cannot be used afterwards.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Name of the network plugin or transport to use (`netName`).
    pub fn net(mut self, name: impl Into<String>) -> Self {
        self.net = Some(name.into());
        self
    }

    /// Name of the communicator in logs and profilers (`commName`).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    numbers! {
        /// Fewest CTAs of a collective (`minCTAs`).
        min_ctas;
        /// Most CTAs of a collective (`maxCTAs`).
        max_ctas;
        /// CTAs in a cluster of NCCL's kernels (`cgaClusterSize`).
        cga_cluster_size;
        /// CTAs of NVLS collectives (`nvlsCTAs`).
        nvls_ctas;
        /// Channels to each peer over the network (`nChannelsPerNetPeer`).
        channels_per_net_peer;
        /// Traffic class of the network (`trafficClass`).
        traffic_class;
        /// CTA policy, a combination of `NCCL_CTA_POLICY_…` (`CTAPolicy`).
        cta_policy;
        /// Contexts for host-side one-sided operations; 0 does without them (`numRmaCtx`; NCCL 2.29 and later).
        rma_contexts;
        /// Most peers with point-to-point connections (`maxP2pPeers`; NCCL 2.30 and later).
        max_p2p_peers;
    }

    switches! {
        /// Whether communicators split from this one share its resources (`splitShare`).
        split_share;
        /// Whether communicators shrunk from this one share its resources (`shrinkShare`).
        shrink_share;
        /// Whether CollNet may be used (`collnetEnable`).
        collnet;
        /// Whether scheduling favours NVLink (`nvlinkCentricSched`).
        nvlink_centric;
    }

    pub(crate) fn operation_timeout(&self) -> Duration {
        self.timeout
    }

    /// The struct for the loaded library.
    pub(crate) fn encode(&self, nccl: &Nccl) -> Result<EncodedConfig> {
        let generation = nccl.generation();
        self.need(self.rma_contexts.is_some(), generation, Generation::V2_29, "rma_contexts")?;
        self.need(self.max_p2p_peers.is_some(), generation, Generation::V2_30, "max_p2p_peers")?;
        let text = |what, value: &Option<String>| {
            let c_string = value.as_deref().map(CString::new).transpose();
            c_string.map_err(|_| Error::argument(what, format!("{value:?}"), "text without a NUL"))
        };
        let mut config = EncodedConfig {
            bytes: Bytes::zeroed(),
            net: text("the network's name", &self.net)?,
            name: text("the communicator's name", &self.name)?,
        };

        macro_rules! put {
            ($($field:ident = $value:expr;)*) => {
                $(config.bytes.put(offset_of!(v2_32::ncclConfig_t, $field), $value);)*
            };
        }
        let number = |value: Option<i32>| value.unwrap_or(UNDEFINED);
        let switch = |value: Option<bool>| value.map_or(UNDEFINED, i32::from);
        let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
        let (net, name) = (pointer(&config.net), pointer(&config.name));
        put! {
            size = generation.config_size();
            magic = NCCL_API_MAGIC;
            version = nccl.declared_version().code();
            blocking = 0_i32;
            cgaClusterSize = number(self.cga_cluster_size);
            minCTAs = number(self.min_ctas);
            maxCTAs = number(self.max_ctas);
            netName = net;
            splitShare = switch(self.split_share);
            trafficClass = number(self.traffic_class);
            commName = name;
            collnetEnable = switch(self.collnet);
            CTAPolicy = number(self.cta_policy);
            shrinkShare = switch(self.shrink_share);
            nvlsCTAs = number(self.nvls_ctas);
            nChannelsPerNetPeer = number(self.channels_per_net_peer);
            nvlinkCentricSched = switch(self.nvlink_centric);
            graphUsageMode = UNDEFINED;
            numRmaCtx = number(self.rma_contexts);
            maxP2pPeers = number(self.max_p2p_peers);
            graphStreamOrdering = UNDEFINED;
            launchOrderImplicit = UNDEFINED;
            numRmaSig = UNDEFINED;
            rmaEagerInit = UNDEFINED;
            hostCftMode = UNDEFINED;
            nvlsHostMode = UNDEFINED;
        }
        Ok(config)
    }

    fn need(&self, set: bool, generation: Generation, since: Generation, what: &'static str) -> Result<()> {
        if set && generation < since {
            let (_, minor, _) = since.newest().parts();
            return Err(Error::Unsupported { what, reason: format!("it needs NCCL 2.{minor} or newer") });
        }
        Ok(())
    }
}

/// A configuration as NCCL reads it. NCCL keeps the pointers to its texts, so that it lives as long as the communicator.
pub(crate) struct EncodedConfig {
    bytes: Bytes<128>,
    net: Option<CString>,
    name: Option<CString>,
}

const _: () = assert!(size_of::<v2_32::ncclConfig_t>() <= 128);

impl EncodedConfig {
    pub(crate) fn as_mut_ptr(&mut self) -> *mut ncclConfig_t {
        self.bytes.as_mut_ptr().cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::nccl_of;
    use nccl_gin_sys::v2_28;

    fn encoded(config: &Config, code: u32) -> EncodedConfig {
        config.encode(&nccl_of(code)).unwrap()
    }

    #[test]
    fn defaults_are_undefined_and_non_blocking() {
        let config = encoded(&Config::new(), 22809);
        assert_eq!(config.bytes.get::<usize>(0), 80);
        assert_eq!(config.bytes.get::<u32>(8), 0xcafe_beef);
        assert_eq!(config.bytes.get::<u32>(12), 22809);
        assert_eq!(config.bytes.get::<i32>(offset_of!(v2_28::ncclConfig_t, blocking)), 0);
        for offset in [20, 24, 28, 40, 44, 56, 60, 64, 68, 72, 76] {
            assert_eq!(config.bytes.get::<i32>(offset), i32::MIN, "at {offset}");
        }
        for offset in [32, 48] {
            assert_eq!(config.bytes.get::<usize>(offset), 0, "at {offset}");
        }
        for (code, size) in [(22907, 88), (23007, 96), (23102, 112), (23203, 120), (23305, 120)] {
            let config = encoded(&Config::new(), code);
            assert_eq!((config.bytes.get::<usize>(0), config.bytes.get::<u32>(12)), (size, code.min(23203)));
        }
    }

    #[test]
    fn what_is_set_lands_in_its_field() {
        let config = Config::new()
            .min_ctas(2)
            .max_ctas(9)
            .split_share(true)
            .name("layer 3")
            .rma_contexts(0)
            .max_p2p_peers(5);
        let config = encoded(&config, 23203);
        let get = |offset| config.bytes.get::<i32>(offset);
        assert_eq!((get(24), get(28), get(40), get(84), get(88)), (2, 9, 1, 0, 5));
        assert_eq!(config.bytes.get::<usize>(48), config.name.as_ref().unwrap().as_ptr() as usize);
    }

    #[test]
    fn what_a_version_lacks_is_refused_with_the_reason() {
        let error = Config::new().rma_contexts(1).encode(&nccl_of(22809)).err().unwrap();
        assert_eq!(error.to_string(), "rma_contexts cannot be had: it needs NCCL 2.29 or newer");
        let error = Config::new().max_p2p_peers(1).encode(&nccl_of(22907)).err().unwrap();
        assert!(error.to_string().contains("2.30"), "{error}");
        let error = Config::new().name("a\0b").encode(&nccl_of(23203)).err().unwrap();
        assert!(matches!(error, Error::Argument { what: "the communicator's name", .. }), "{error}");
    }
}
