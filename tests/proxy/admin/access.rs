//! Who may: the token, the link, the cookie, the origin.

use traygate::runtime;

use super::super::support::app::App;
use super::super::support::client::{get, post};
use super::super::support::upstream::Upstream;
use super::{http, token};

const STATE: &str = "/traygate/api/state";

#[tokio::test]
async fn the_api_wants_the_token_of_this_run() {
    let app = App::start("").await;
    let token = token(&app);
    let refused = http(&app, get(STATE)).await;
    assert_eq!(refused.status(), 401);
    assert_eq!(refused.json()["error"]["code"], "token_needed");
    for wrong in ["", "x", &token[1..], &format!("{token}0")] {
        let shown = get(STATE).header("authorization", &format!("Bearer {wrong}"));
        assert_eq!(http(&app, shown).await.status(), 401, "{wrong:?}");
    }
    let shown = get(STATE).header("authorization", &format!("Bearer {token}"));
    assert_eq!(http(&app, shown).await.status(), 200);
    // What is not there is not told to strangers either.
    assert_eq!(http(&app, get("/traygate/api/nothing")).await.status(), 401);
    // A provider's key is no token, nor the other way round.
    let other = App::start("").await;
    let shown = get(STATE).header("authorization", &format!("Bearer {token}"));
    assert_eq!(http(&other, shown).await.status(), 401, "another run's");
}

#[tokio::test]
async fn the_printed_link_becomes_a_cookie_and_leaves_no_token_in_the_address() {
    let app = App::start("").await;
    let link = app.running().core().link().expect("it listens");
    let path = link
        .split_once(&app.addr().to_string())
        .expect("its address")
        .1;
    let followed = http(&app, get(path)).await;
    assert_eq!(followed.status(), 303);
    assert_eq!(followed.header("location"), Some("/traygate/"));
    let cookie = followed.header("set-cookie").expect("a cookie").to_owned();
    assert!(
        cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"),
        "{cookie}"
    );
    let pair = cookie.split(';').next().expect("a pair");
    assert!(pair.starts_with(&format!("traygate-{}=", app.addr().port())));
    let asked = get(STATE).header("cookie", &format!("a=b; {pair}; c=d"));
    assert_eq!(http(&app, asked).await.status(), 200);
    let page = http(&app, get("/traygate/").header("cookie", pair)).await;
    assert!(page.text().contains("state"), "{}", page.text());
    // A page never goes out under a policy that lets scripts in.
    let policy = page.header("content-security-policy").expect("a policy");
    assert!(policy.contains("default-src 'none'"));

    let stale = http(&app, get("/traygate/?token=0123")).await;
    assert_eq!(stale.status(), 401);
    assert!(stale.header("set-cookie").is_none());
    let without = http(&app, get("/traygate/")).await;
    assert_eq!(without.status(), 200);
    assert!(
        without.text().contains("open the link"),
        "{}",
        without.text()
    );
}

#[tokio::test]
async fn no_other_page_may_ask_though_its_browser_has_the_cookie() {
    let app = App::start("").await;
    let own = format!("http://{}", app.addr());
    let table: [(&[(&str, &str)], u16); 6] = [
        (&[("origin", &own)], 200),
        (&[("sec-fetch-site", "same-origin")], 200),
        (&[("origin", "http://localhost:3000")], 403),
        (&[("sec-fetch-site", "same-site")], 403),
        (&[("sec-fetch-site", "cross-site")], 403),
        (&[("origin", "https://evil.example")], 403),
    ];
    for (headers, status) in table {
        let mut asked = get(STATE)
            .header("host", &app.addr().to_string())
            .header("authorization", &format!("Bearer {}", token(&app)));
        for (name, value) in headers {
            asked = asked.header(name, value);
        }
        let answer = http(&app, asked).await;
        assert_eq!(answer.status(), status, "{headers:?}");
        // Not even an allowed origin may read it.
        let shared = answer.header("access-control-allow-origin");
        assert!(status == 403 || shared.is_none(), "{headers:?}: {shared:?}");
    }
}

#[tokio::test]
async fn a_preflight_for_the_api_is_not_answered_as_for_providers() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let asked = super::super::support::client::Outgoing::new("OPTIONS", STATE)
        .header("origin", "http://localhost:3000")
        .header("access-control-request-method", "POST");
    let answer = http(&app, asked).await;
    assert!(answer.status() >= 400, "{}", answer.status());
    assert!(answer.header("access-control-allow-methods").is_none());
}

#[tokio::test]
async fn the_runtime_file_leads_to_a_running_one_and_goes_with_it() {
    let app = App::start("").await;
    let folder = app.data_dir().to_owned();
    let found = runtime::find(&folder).expect("the file");
    assert_eq!(
        (found.port, found.pid),
        (app.addr().port(), std::process::id())
    );
    assert_eq!(found.token, token(&app));
    assert!(found.reload_keys().await, "it opens the API");
    let _folder = app.stop().await;
    assert!(runtime::find(&folder).is_none());
    assert!(!found.reload_keys().await, "nobody is there");
}

#[tokio::test]
async fn the_token_never_goes_to_a_provider_however_the_address_is_mistyped() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    let token = token(&app);
    let bearer = format!("Bearer {token}");
    for (path, status) in [
        ("//traygate/api/state", 404),
        ("/TRAYGATE/api/state", 404),
        ("/traygate%2Fapi/state", 404),
        ("/@x/traygate/api/settings", 404),
        ("/t/abc/traygate/api/settings", 404),
        ("/openai/traygate/api/state", 400),
        ("/api/state", 400),
    ] {
        let answer = http(&app, get(path).header("authorization", &bearer)).await;
        assert_eq!(answer.status(), status, "{path}: {}", answer.text());
        let answer = http(&app, get(path).header("x-api-key", &token)).await;
        assert_eq!(answer.status(), status, "{path}");
    }
    let in_query = http(&app, get(&format!("/v1/models?token={token}"))).await;
    assert_eq!(in_query.status(), 400);
    assert!(
        in_query.text().contains("/traygate/api/"),
        "{}",
        in_query.text()
    );
    assert_eq!(up.requests().len(), 0);
    // A provider's paths may well have the word in them.
    assert_eq!(
        http(&app, get("/openai/v1/models/traygate")).await.status(),
        200
    );
}

#[tokio::test]
async fn what_is_traygates_own_never_reaches_a_provider() {
    let up = Upstream::chatting().await;
    let app = App::before(&up).await;
    for path in [
        "/traygate/api/nothing",
        "/traygate/nothing",
        "/favicon.ico",
        "/traygate",
    ] {
        http(&app, get(path)).await;
        http(&app, post(path).json("{}")).await;
    }
    assert_eq!(up.requests().len(), 0);
}
