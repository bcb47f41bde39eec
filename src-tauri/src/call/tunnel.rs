//! Upgrades (WebSockets): refused where the call must be guarded and counted, tunnelled elsewhere.

use std::sync::Arc;

use http::header::{CONNECTION, HeaderValue, UPGRADE};
use http::request::Parts;
use http::{Method, Response, StatusCode};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tracing::debug;

use super::credential::dress;
use super::error::CallError;
use super::headers::{keep_end_to_end, remove_cors, remove_hop_by_hop};
use super::identify::Place;
use super::record::Row;
use super::stream_back::{self, ClientBody};
use crate::core::Core;
use crate::mode::Mode;
use crate::provider::clients::describe;
use crate::settings::Setting;
use crate::store::{Billing, DedupLabel, Outcome};

/// True if the request asks for another protocol on its connection, in the way it must: with
/// `connection: upgrade` (RFC 9110, 7.8). Others are served as they are, an offer of HTTP/2 in
/// passing (`h2c`) and one that has a body to bring across too.
pub fn is_upgrade(parts: &Parts) -> bool {
    let offers_other = parts
        .headers
        .get(UPGRADE)
        .is_some_and(|protocol| !protocol.as_bytes().eq_ignore_ascii_case(b"h2c"));
    offers_other
        && parts.method == Method::GET
        && parts
            .headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .any(|word| word.trim().eq_ignore_ascii_case("upgrade"))
}

/// Answers an upgrade: 426 on a generation route, so that the client falls back to HTTP, and a
/// tunnel elsewhere.
pub async fn answer(
    core: &Arc<Core>,
    place: Place,
    parts: Parts,
    mut row: Row,
) -> Response<ClientBody> {
    let dialect = place.dialect;
    place.name_in(&mut row, &parts);
    row.identify(|start| start.billing = Billing::Unmetered);
    let is_guarded = core.mode() != Mode::Bypass;
    let opened = if place.route_of_post().is_generation() && is_guarded {
        Err(CallError::UpgradeRequired)
    } else {
        open(core, &place, parts, &mut row).await
    };
    let mut response = match opened {
        Ok(opened) => opened.serve(core, row),
        Err(error) => super::refused(&error, dialect, row),
    };
    stream_back::mark(&mut response, place.provider(), DedupLabel::Off);
    response
}

/// Both sides of an upgrade, where the upstream has answered.
struct Opened {
    client: Option<OnUpgrade>,
    upstream: reqwest::Response,
}

async fn open(
    core: &Arc<Core>,
    place: &Place,
    mut parts: Parts,
    row: &mut Row,
) -> Result<Opened, CallError> {
    let provider = place.provider();
    let unreachable = |reason: String| CallError::UpstreamUnreachable {
        provider: provider.name().clone(),
        reason,
    };
    let url = place.url(provider, parts.uri.query())?;
    let client = parts.extensions.remove::<OnUpgrade>();
    let protocol = parts.headers.get(UPGRADE).cloned();
    keep_end_to_end(&mut parts.headers);
    dress(
        core,
        &place.world,
        provider,
        parts.uri.query(),
        &mut parts.headers,
    )
    .await?;
    if let Some(protocol) = protocol {
        parts
            .headers
            .insert(CONNECTION, HeaderValue::from_static("upgrade"));
        parts.headers.insert(UPGRADE, protocol);
    }
    let mut request = reqwest::Request::new(parts.method, url);
    *request.headers_mut() = parts.headers;
    let http = provider
        .clients
        .for_upgrades()
        .map_err(|error| unreachable(error.to_string()))?;
    row.open(DedupLabel::Off, None);
    row.sent_upstream(core.clock.now());
    let limit = provider.settings.limits.first_byte;
    match tokio::time::timeout(limit, http.execute(request)).await {
        Ok(Ok(upstream)) => Ok(Opened { client, upstream }),
        Ok(Err(error)) => Err(unreachable(describe(&error.without_url()))),
        Err(_) => Err(CallError::UpstreamTimeout {
            provider: provider.name().clone(),
            what: "answer the upgrade",
            limit,
            setting: provider.settings.in_force.name(Setting::TimeoutSecs),
        }),
    }
}

impl Opened {
    /// Passes the upstream's answer on and, if it changed protocols, carries bytes both ways until
    /// one side closes.
    fn serve(self, core: &Core, mut row: Row) -> Response<ClientBody> {
        let status = self.upstream.status();
        let mut headers = self.upstream.headers().clone();
        let protocol = headers.get(UPGRADE).cloned();
        remove_hop_by_hop(&mut headers);
        remove_cors(&mut headers);
        row.status(status);
        row.settle(Outcome::Completed, None);
        let client = match self.client {
            Some(client) if status == StatusCode::SWITCHING_PROTOCOLS => client,
            _ => {
                // Refused by the upstream: its answer is the client's.
                if status.is_client_error() || status.is_server_error() {
                    row.settle(
                        Outcome::UpstreamError,
                        Some(format!("status {status}").into()),
                    );
                }
                let body = ClientBody::Passing(self.upstream.into());
                let mut response = Response::new(body);
                *response.status_mut() = status;
                *response.headers_mut() = headers;
                return response;
            }
        };
        if let Some(protocol) = protocol {
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, protocol);
        }
        let carry = async move {
            // Unless it comes to an end of its own.
            row.settle(Outcome::Stopped, None);
            let carried = async {
                let mut upstream = self
                    .upstream
                    .upgrade()
                    .await
                    .map_err(std::io::Error::other)?;
                let client = client.await.map_err(std::io::Error::other)?;
                copy_bidirectional(&mut TokioIo::new(client), &mut upstream).await
            };
            let live = row.live().cloned();
            let stopped = async {
                match &live {
                    Some(live) => live.stopped().await,
                    None => std::future::pending().await,
                }
            };
            let carried = tokio::select! {
                carried = carried => carried,
                () = stopped => return,
            };
            match carried {
                Ok(_) => row.settle(Outcome::Completed, None),
                Err(error) => {
                    debug!(%error, "a tunnel broke");
                    row.settle(Outcome::BrokenStream, Some(error.to_string().into()));
                }
            }
        };
        tokio::spawn(core.open_calls.clone().unless_over(carry));
        let mut response = Response::new(ClientBody::Own(None));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }
}
