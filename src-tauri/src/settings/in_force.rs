//! Names the settings that a provider is held to as a person would change them: a message that
//! names one that is not in force sends them the wrong way.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::Overrides;

/// A setting that every provider may have of its own, and that messages name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Setting {
    Concurrency,
    Queue,
    QueueSecs,
    ConnectSecs,
    TimeoutSecs,
    UnstreamedTimeoutSecs,
    IdleSecs,
    OpenSecs,
}

impl Setting {
    const ALL: [Setting; 8] = [
        Setting::Concurrency,
        Setting::Queue,
        Setting::QueueSecs,
        Setting::ConnectSecs,
        Setting::TimeoutSecs,
        Setting::UnstreamedTimeoutSecs,
        Setting::IdleSecs,
        Setting::OpenSecs,
    ];

    /// What holds for every provider that does not say otherwise: `limits.queue`.
    pub fn general(self) -> &'static str {
        match self {
            Setting::Concurrency => "limits.concurrency",
            Setting::Queue => "limits.queue",
            Setting::QueueSecs => "limits.queue_secs",
            Setting::ConnectSecs => "limits.connect_secs",
            Setting::TimeoutSecs => "limits.timeout_secs",
            Setting::UnstreamedTimeoutSecs => "limits.unstreamed_timeout_secs",
            Setting::IdleSecs => "limits.idle_secs",
            Setting::OpenSecs => "breaker.open_secs",
        }
    }

    /// `queue` of `limits.queue`: its key in a `[[provider]]`.
    pub fn key(self) -> &'static str {
        let general = self.general();
        general.split_once('.').map_or(general, |(_, key)| key)
    }

    /// `provider.mine.queue`, the name that a patch of the settings has for it.
    fn of(self, provider: &str) -> String {
        format!("provider.{provider}.{}", self.key())
    }
}

/// Under which names a provider's settings are in force, where it is not the general one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InForce(Arc<BTreeMap<Setting, String>>);

impl InForce {
    /// The name under which a person changes it: `provider.mine.queue` where it is the provider's
    /// own, `limits.queue` where it is inherited, `--timeout` or `TRAYGATE_TIMEOUT` where that wins.
    pub fn name(&self, setting: Setting) -> Cow<'static, str> {
        match self.0.get(&setting) {
            Some(name) => Cow::Owned(name.clone()),
            None => Cow::Borrowed(setting.general()),
        }
    }

    /// What `[limits]` or `[breaker]` says does not reach these of the provider.
    pub(super) fn are_its_own(&mut self, provider: &str, is_own: impl Fn(&str) -> bool) {
        let own = Setting::ALL.into_iter().filter(|one| is_own(one.key()));
        Arc::make_mut(&mut self.0).extend(own.map(|one| (one, one.of(provider))));
    }

    pub(super) fn lay_over(&mut self, provider: &str, overrides: &Overrides) {
        for setting in Setting::ALL {
            if let Some(by) = overrides.locks(&setting.of(provider)) {
                Arc::make_mut(&mut self.0).insert(setting, by);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{Flag, Settings};
    use super::*;

    #[test]
    fn a_setting_is_named_by_what_a_person_would_have_to_change() {
        let text = "[limits]\nqueue = 9\n[breaker]\nopen_secs = 3\n\
            [[provider]]\nname = \"b\"\nkind = \"openai\"\nbase_url = \"http://h\"\n\
            queue = 1\nopen_secs = 2\n\
            [[provider]]\nname = \"llama-cpp\"\nlocal = false\n";
        let overrides = Overrides {
            timeout: Some(Duration::from_secs(1)),
            concurrency: Some(2),
            from_variables: vec![Flag::Timeout],
            ..Overrides::default()
        };
        let plain = Settings::parse(text, &Overrides::default()).expect("settings");
        let overridden = Settings::parse(text, &overrides).expect("settings");
        for (settings, provider, setting, name) in [
            (&plain, "b", Setting::Queue, "provider.b.queue"),
            (&plain, "b", Setting::OpenSecs, "provider.b.open_secs"),
            (&plain, "b", Setting::QueueSecs, "limits.queue_secs"),
            (&plain, "openai", Setting::Queue, "limits.queue"),
            (&plain, "openai", Setting::OpenSecs, "breaker.open_secs"),
            // `[limits]` does not change what a local one starts from.
            (
                &plain,
                "ollama",
                Setting::Concurrency,
                "provider.ollama.concurrency",
            ),
            (
                &plain,
                "ollama",
                Setting::TimeoutSecs,
                "provider.ollama.timeout_secs",
            ),
            (&plain, "ollama", Setting::Queue, "limits.queue"),
            (
                &plain,
                "llama-cpp",
                Setting::TimeoutSecs,
                "limits.timeout_secs",
            ),
            (&overridden, "b", Setting::Queue, "provider.b.queue"),
            (&overridden, "b", Setting::Concurrency, "--concurrency"),
            (
                &overridden,
                "ollama",
                Setting::TimeoutSecs,
                "TRAYGATE_TIMEOUT",
            ),
            (
                &overridden,
                "openai",
                Setting::UnstreamedTimeoutSecs,
                "TRAYGATE_TIMEOUT",
            ),
        ] {
            let provider = settings.provider(provider).expect("there");
            assert_eq!(provider.in_force.name(setting), name);
        }
    }

    #[test]
    fn every_name_is_one_of_the_files() {
        let known = super::super::file::known();
        for setting in Setting::ALL {
            let (section, key) = setting.general().split_once('.').expect("a section");
            for section in [section, "provider"] {
                assert!(
                    known.contains_key(&(section.to_owned(), key)),
                    "{section}.{key}"
                );
            }
        }
    }
}
