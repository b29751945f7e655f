"""A user's channels and notification preferences, which only that user can see (NOTE-1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.notifier.inbox.rules import Draft, NotificationKind
from pawl.notifier.inbox.store import PostgresStore
from pawl.notify.v1 import channel_pb2, notify_pb2, preference_pb2
from pawl.server.db.database import Database
from tests.poll import until
from tests.rpc.notifier.conftest import ANN, ANN_ELSEWHERE, BOB, DEAD, DELIVERED, SKIPPED, URL, WAITING, Desk, created
from tests.rpc.refusals import reason_of
from tests.rpc.stubs import ChannelServiceAsyncStub, PreferenceServiceAsyncStub
from tests.web_server import WebServer


async def test_channel_is_created_changed_and_deleted(channels: ChannelServiceAsyncStub) -> None:
    made = await created(channels, name="pager", kinds=[notify_pb2.NOTIFICATION_KIND_RUN_FAILED])
    channel = made.channel
    assert made.secret.startswith("whsec_")
    assert channel.enabled
    found = await channels.GetChannel(channel_pb2.GetChannelRequest(channel_id=channel.channel_id), metadata=ANN)
    assert found.channel == channel
    channel.name, channel.enabled = "mail", False
    del channel.kinds[:]
    change = channel_pb2.UpdateChannelRequest(
        channel_id=channel.channel_id, name="mail", kinds=notify_pb2.NotificationKinds(), enabled=False
    )
    assert (await channels.UpdateChannel(change, metadata=ANN)).channel == channel
    change = channel_pb2.UpdateChannelRequest(channel_id=channel.channel_id)
    assert (await channels.UpdateChannel(change, metadata=ANN)).channel == channel, "omitted fields are unchanged"
    assert list((await channels.ListChannels(channel_pb2.ListChannelsRequest(), metadata=ANN)).channels) == [channel]
    await channels.DeleteChannel(channel_pb2.DeleteChannelRequest(channel_id=channel.channel_id), metadata=ANN)
    assert not (await channels.ListChannels(channel_pb2.ListChannelsRequest(), metadata=ANN)).channels


async def test_a_request_creates_one_channel_and_its_secret_is_returned_only_once(
    channels: ChannelServiceAsyncStub,
) -> None:
    first, again = await created(channels, request_id="r1"), await created(channels, request_id="r1")
    assert (again.channel, again.secret) == (first.channel, "")
    assert await reason_of(created(channels, "https://example.com/else", request_id="r1")) == "REQUEST_ID_REUSED"


async def test_invalid_channel_is_rejected(channels: ChannelServiceAsyncStub) -> None:
    rows: list[dict[str, Any]] = [{"kinds": [kind]} for kind in (0, 99)]
    rows += [{"after_seconds": 86401}, {"create_time": Timestamp(seconds=2**62)}]
    urls = ["https://169.254.169.254/", "https://10.1.2.3/", "https://elsewhere.example/", "ftp://example.com/", ""]
    urls += ["http://example.com/"]  # Anyone who reads a body with a secret would see it
    for fields in (*rows, *({"url": url} for url in urls)):
        assert await reason_of(created(channels, **fields)) == "INVALID_FIELD", fields
    channel = (await created(channels)).channel
    for url in urls:
        change = channel_pb2.UpdateChannelRequest(channel_id=channel.channel_id, url=url)
        assert await reason_of(channels.UpdateChannel(change, metadata=ANN)) == "INVALID_FIELD", url
    for more in range(9):
        request = channel_pb2.CreateChannelRequest(
            channel=channel_pb2.Channel(url=URL), validate_only=True, created_before=8 - more
        )
        assert not (await channels.CreateChannel(request, metadata=ANN)).secret
        request.created_before += 1
        assert await reason_of(channels.CreateChannel(request, metadata=ANN)) == "INVALID_FIELD"
        await created(channels)
    assert await reason_of(created(channels)) == "INVALID_FIELD", "a user has at most ten"
    assert await reason_of(channels.CreateChannel(request, metadata=ANN)) == "INVALID_FIELD"


async def test_channel_of_another_user_is_not_found(channels: ChannelServiceAsyncStub, receiver: WebServer) -> None:
    channel = (await created(channels, f"http://127.0.0.1:{receiver.port}/")).channel
    test = await channels.TestChannel(channel_pb2.TestChannelRequest(channel_id=channel.channel_id), metadata=ANN)
    channel_id = channel.channel_id
    for metadata in (BOB, ANN_ELSEWHERE):
        assert not (await channels.ListChannels(channel_pb2.ListChannelsRequest(), metadata=metadata)).channels
        for call in (
            channels.GetChannel(channel_pb2.GetChannelRequest(channel_id=channel_id), metadata=metadata),
            channels.UpdateChannel(channel_pb2.UpdateChannelRequest(channel_id=channel_id), metadata=metadata),
            channels.DeleteChannel(channel_pb2.DeleteChannelRequest(channel_id=channel_id), metadata=metadata),
            channels.RotateChannelSecret(
                channel_pb2.RotateChannelSecretRequest(channel_id=channel_id), metadata=metadata
            ),
            channels.TestChannel(channel_pb2.TestChannelRequest(channel_id=channel_id), metadata=metadata),
            channels.ListDeliveries(channel_pb2.ListDeliveriesRequest(channel_id=channel_id), metadata=metadata),
        ):
            assert await reason_of(call) == "CHANNEL_NOT_FOUND"
        resend = channel_pb2.ResendDeliveryRequest(delivery_id=test.delivery.delivery_id)
        assert await reason_of(channels.ResendDelivery(resend, metadata=metadata)) == "DELIVERY_NOT_FOUND"
        several = channel_pb2.ResendDeliveriesRequest(delivery_ids=[test.delivery.delivery_id])
        assert await reason_of(channels.ResendDeliveries(several, metadata=metadata)) == "DELIVERY_NOT_FOUND"
        everything = await channels.ListDeliveries(channel_pb2.ListDeliveriesRequest(), metadata=metadata)
        assert (list(everything.deliveries), list(everything.counts)) == ([], [])


_SET = "UPDATE notifier.webhook_deliveries SET due_time = NULL, state = $2 WHERE type = $1"


@pytest.fixture
async def two_channels(
    channels: ChannelServiceAsyncStub,
    store: PostgresStore,
    draft: Callable[..., Draft],
    database: Database,
    desk: Desk,
) -> list[str]:
    # Waiting deliveries are not attempted.
    ids = [(await created(channels, after_seconds=86400)).channel.channel_id for _ in range(2)]
    await channels.CreateChannel(
        channel_pb2.CreateChannelRequest(channel=channel_pb2.Channel(url=URL, after_seconds=86400)), metadata=BOB
    )
    kinds = ("RUN_FAILED", "RUN_CANCELLED", "RUN_EXPIRED", "RUN_COMPLETED")
    for user in ("ann", "bob"):
        await store.add([replace(draft(f"{user}_{kind}", user=user), kind=NotificationKind[kind]) for kind in kinds])
    await until(desk.is_idle)
    for kind, state in (("run.failed", "dead"), ("run.cancelled", "skipped"), ("run.expired", "delivered")):
        await database.execute(_SET, kind, state)
    return ids


async def listed(channels: ChannelServiceAsyncStub, **request: Any) -> list[channel_pb2.ChannelDelivery]:
    found: list[channel_pb2.ChannelDelivery] = []
    asked = channel_pb2.ListDeliveriesRequest(**request)
    while True:
        page = await channels.ListDeliveries(asked, metadata=ANN)
        assert bool(page.counts) is not bool(asked.page_token), "they come with the first page"
        found += page.deliveries
        if not page.next_page_token:
            return found
        asked.page_token = page.next_page_token


async def test_deliveries_are_listed_by_state_across_channels(
    channels: ChannelServiceAsyncStub, two_channels: list[str]
) -> None:
    everything = await listed(channels)
    assert (sorted({each.channel_id for each in everything}), len(everything)) == (sorted(two_channels), 8)
    places = [(each.create_time.ToDatetime(), each.delivery_id) for each in everything]
    assert places == sorted(places, reverse=True)
    for size in (1, 3):
        assert await listed(channels, page_size=size) == everything
    for states in ([DEAD], [SKIPPED], [DELIVERED], [WAITING], [DEAD, SKIPPED]):
        found = [each for each in everything if each.state in states]
        assert (len(found), await listed(channels, states=states)) == (2 * len(states), found)
        assert await listed(channels, states=states, page_size=1) == found
    of_one = [each for each in everything if each.channel_id == two_channels[0] and each.state == DEAD]
    assert await listed(channels, channel_id=two_channels[0], states=[DEAD]) == of_one
    page = await channels.ListDeliveries(channel_pb2.ListDeliveriesRequest(states=[DEAD]), metadata=ANN)
    assert {each.state: each.count for each in page.counts} == {DEAD: 2, SKIPPED: 2, DELIVERED: 2, WAITING: 2}
    of_channel = await channels.ListDeliveries(
        channel_pb2.ListDeliveriesRequest(channel_id=two_channels[0]), metadata=ANN
    )
    assert {each.state: each.count for each in of_channel.counts} == {DEAD: 1, SKIPPED: 1, DELIVERED: 1, WAITING: 1}
    unknown = channel_pb2.ListDeliveriesRequest(states=[channel_pb2.CHANNEL_DELIVERY_STATE_UNSPECIFIED])
    assert await reason_of(channels.ListDeliveries(unknown, metadata=ANN)) == "INVALID_FIELD"


async def test_resend_is_atomic_for_several_deliveries(
    channels: ChannelServiceAsyncStub, two_channels: list[str], database: Database
) -> None:
    dead = [each.delivery_id for each in await listed(channels, states=[DEAD])]
    others = await database.fetchval(
        "SELECT delivery_id FROM notifier.webhook_deliveries WHERE user_id = 'bob' LIMIT 1"
    )
    for ids in ([*dead, others], [*dead, "dlv_nope"]):
        resend = channels.ResendDeliveries(channel_pb2.ResendDeliveriesRequest(delivery_ids=ids), metadata=ANN)
        assert await reason_of(resend) == "DELIVERY_NOT_FOUND"
    assert [each.delivery_id for each in await listed(channels, states=[DEAD])] == dead
    for count in (0, 201):
        request = channel_pb2.ResendDeliveriesRequest(delivery_ids=["dlv_1"] * count)
        assert await reason_of(channels.ResendDeliveries(request, metadata=ANN)) == "INVALID_FIELD"
    request = channel_pb2.ResendDeliveriesRequest(delivery_ids=dead[::-1])
    sent = (await channels.ResendDeliveries(request, metadata=ANN)).deliveries
    assert [(each.delivery_id, each.state, each.tries) for each in sent] == [(each, WAITING, 0) for each in dead[::-1]]
    assert await listed(channels, states=[DEAD]) == []


Drafts = Callable[..., Draft]
ALWAYS = preference_pb2.QuietHours(start="00:00", end="00:00")
KINDS = notify_pb2.NotificationKinds(kinds=[notify_pb2.NOTIFICATION_KIND_RUN_FAILED])


async def prefer(stub: PreferenceServiceAsyncStub, **change: object) -> preference_pb2.Preferences:
    asked = preference_pb2.UpdatePreferencesRequest(**change)  # type: ignore[arg-type]
    return (await stub.UpdatePreferences(asked, metadata=ANN)).preferences


async def preferences_of(
    stub: PreferenceServiceAsyncStub, metadata: tuple[tuple[str, str], ...] = ANN
) -> preference_pb2.Preferences:
    return (await stub.GetPreferences(preference_pb2.GetPreferencesRequest(), metadata=metadata)).preferences


async def mute(stub: PreferenceServiceAsyncStub, conversation_id: str, until_time: datetime | None = None) -> None:
    asked = preference_pb2.Mute(conversation_id=conversation_id)
    if until_time is not None:
        asked.until_time.FromDatetime(until_time)
    await stub.MuteConversation(preference_pb2.MuteConversationRequest(mute=asked), metadata=ANN)


async def test_changing_preferences_keeps_unspecified_fields(preferences: PreferenceServiceAsyncStub) -> None:
    nothing = preference_pb2.Preferences(quiet=preference_pb2.QuietTimes())
    assert await preferences_of(preferences) == nothing
    sundays = preference_pb2.QuietHours(start="22:00", end="07:00", days=[preference_pb2.WEEKDAY_SUNDAY])
    quiet = preference_pb2.QuietTimes(hours=[ALWAYS, sundays], time_zone="Europe/Berlin")
    assert await prefer(preferences, kinds=KINDS) == preference_pb2.Preferences(
        kinds=KINDS.kinds, quiet=preference_pb2.QuietTimes()
    )
    both = preference_pb2.Preferences(kinds=KINDS.kinds, quiet=quiet)
    assert await prefer(preferences, quiet=quiet) == await preferences_of(preferences) == both
    for other in (BOB, ANN_ELSEWHERE):
        assert await preferences_of(preferences, other) == nothing
    for change in (
        {"kinds": notify_pb2.NotificationKinds(kinds=[99])},  # type: ignore[list-item]
        {"quiet": preference_pb2.QuietTimes(time_zone="Mars/Olympus")},
    ):
        assert await reason_of(prefer(preferences, **change)) == "INVALID_FIELD"
    assert await prefer(preferences, kinds=notify_pb2.NotificationKinds(), quiet=preference_pb2.QuietTimes()) == nothing


async def test_mutes_end_at_their_time_or_when_deleted(preferences: PreferenceServiceAsyncStub) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    await mute(preferences, "conv_1")
    await mute(preferences, "conv_2", later)
    await mute(preferences, "conv_3", later - timedelta(hours=2))
    await prefer(preferences, kinds=KINDS)
    until_time = Timestamp()
    until_time.FromDatetime(later)
    assert list((await preferences_of(preferences)).mutes) == [
        preference_pb2.Mute(conversation_id="conv_1"),
        preference_pb2.Mute(conversation_id="conv_2", until_time=until_time),
    ]
    for _ in range(2):
        ended = preference_pb2.UnmuteConversationRequest(conversation_id="conv_1")
        await preferences.UnmuteConversation(ended, metadata=ANN)
    assert [each.conversation_id for each in (await preferences_of(preferences)).mutes] == ["conv_2"]
    assert await reason_of(mute(preferences, "")) == "INVALID_ID"
    wrong = preference_pb2.Mute(conversation_id="conv_1", until_time=Timestamp(seconds=2**62))
    muting = preferences.MuteConversation(preference_pb2.MuteConversationRequest(mute=wrong), metadata=ANN)
    assert await reason_of(muting) == "INVALID_FIELD"


async def test_a_user_can_mute_at_most_a_thousand_conversations(
    preferences: PreferenceServiceAsyncStub, database: Database
) -> None:
    await database.execute(
        "INSERT INTO notifier.mutes (store_id, user_id, conversation_id)"
        " SELECT 'acme', 'ann', 'conv_' || n FROM generate_series(1, 1000) AS n"
    )
    assert await reason_of(mute(preferences, "conv_more")) == "INVALID_FIELD"
    await mute(preferences, "conv_7", datetime.now(UTC))
    await mute(preferences, "conv_more")


async def test_quiet_hours_delay_deliveries_but_not_the_inbox(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, preferences: PreferenceServiceAsyncStub
) -> None:
    channel_id, _ = await desk.hook()
    now = datetime.now(UTC)
    hours = [f"{(now + timedelta(hours=each)):%H:00}" for each in (-1, 2)]
    quiet = preference_pb2.QuietTimes(hours=[preference_pb2.QuietHours(start=hours[0], end=hours[1])])
    await prefer(preferences, quiet=quiet)
    await store.add([draft("a")])
    held = await desk.settled_delivery(channel_id)
    end = (now + timedelta(hours=2)).replace(minute=0, second=0, microsecond=0)
    assert (held.state, held.tries, held.next_try_time.ToDatetime(UTC)) == (WAITING, 0, end)
    assert (len(await desk.inbox()), receiver.asked) == (1, [])
    await prefer(preferences, quiet=preference_pb2.QuietTimes())
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED, "waiting deliveries are checked again"
