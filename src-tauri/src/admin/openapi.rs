//! `openapi.json`, generated from the routes and types of this code.

use axum::Json;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Traygate",
        description = "What a face needs to see and to steer a running Traygate. Over HTTP it wants the token of this run, from the link that `traygate serve` prints: as a cookie, or as `Authorization: Bearer …`."
    ),
    paths(
        super::state::get_state,
        super::events::get_events,
        super::calls::get_calls,
        super::calls::get_call,
        super::calls::stop_call,
        super::calls::get_body,
        super::series::get_series,
        super::spend::get_spend,
        super::latency::get_latency,
        super::repeats::get_repeats,
        super::settings::get_settings,
        super::settings::patch_settings,
        super::breaker::post_breaker,
        super::keys::put_key,
        super::keys::delete_key,
        super::keys::post_reload,
        super::provider_check::post_check,
        super::dedup::post_clear,
        super::mode::post_mode,
        super::prices::get_prices,
        super::prices::post_refresh,
        super::health::get_health,
        super::health::get_metrics,
    ),
    tags(
        (name = "watching", description = "How everything stands, and what happens"),
        (name = "record", description = "Calls that were made"),
        (name = "control", description = "Steering calls as a whole"),
        (name = "providers", description = "Steering one provider"),
        (name = "settings", description = "The settings file"),
    ),
    security(("token" = []), ("cookie" = [])),
    modifiers(&Schemes),
)]
struct Description;

struct Schemes;

impl Modify for Schemes {
    fn modify(&self, openapi: &mut utoipa::openapi::OpenApi) {
        let components = openapi.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
        let cookie = ApiKey::Cookie(ApiKeyValue::with_description(
            "traygate-7337",
            "set by the link; the number is the port",
        ));
        components.add_security_scheme("cookie", SecurityScheme::ApiKey(cookie));
    }
}

/// The description of the admin API.
pub fn description() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

/// This description.
pub async fn get_openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(description())
}
