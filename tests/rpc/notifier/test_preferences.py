"""The preferences of a user, and what becomes of deliveries by them (NOTE-1)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.chassis.database import Database
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import ConversationId, StoreId
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.notification import Draft
from pawl.notify.v1 import notify_pb2
from pawl.notify.v1 import preference_pb2 as pb
from tests.rpc.notifier.desk import ANN, ANN_ELSEWHERE, BOB, DELIVERED, SKIPPED, WAITING, Desk
from tests.rpc.notifier.test_inbox import reason_of
from tests.web_server import WebServer

if TYPE_CHECKING:
    from pawl.notify.v1.preference_pb2_grpc import PreferenceServiceAsyncStub

Drafts = Callable[..., Draft]
ALWAYS = pb.QuietHours(start="00:00", end="00:00")
KINDS = notify_pb2.NotificationKinds(kinds=[notify_pb2.NOTIFICATION_KIND_RUN_FAILED])


async def prefer(stub: PreferenceServiceAsyncStub, **change: object) -> pb.Preferences:
    asked = pb.UpdatePreferencesRequest(**change)  # type: ignore[arg-type]
    return (await stub.UpdatePreferences(asked, metadata=ANN)).preferences


async def preferences_of(
    stub: PreferenceServiceAsyncStub, metadata: tuple[tuple[str, str], ...] = ANN
) -> pb.Preferences:
    return (await stub.GetPreferences(pb.GetPreferencesRequest(), metadata=metadata)).preferences


async def mute(stub: PreferenceServiceAsyncStub, conversation_id: str, until_time: datetime | None = None) -> None:
    asked = pb.Mute(conversation_id=conversation_id)
    if until_time is not None:
        asked.until_time.FromDatetime(until_time)
    await stub.MuteConversation(pb.MuteConversationRequest(mute=asked), metadata=ANN)


async def test_preferences_are_changed_and_what_is_not_given_stays(preferences: PreferenceServiceAsyncStub) -> None:
    nothing = pb.Preferences(quiet=pb.QuietTimes())
    assert await preferences_of(preferences) == nothing
    sundays = pb.QuietHours(start="22:00", end="07:00", days=[pb.WEEKDAY_SUNDAY])
    quiet = pb.QuietTimes(hours=[ALWAYS, sundays], time_zone="Europe/Berlin")
    assert await prefer(preferences, kinds=KINDS) == pb.Preferences(kinds=KINDS.kinds, quiet=pb.QuietTimes())
    both = pb.Preferences(kinds=KINDS.kinds, quiet=quiet)
    assert await prefer(preferences, quiet=quiet) == await preferences_of(preferences) == both
    for other in (BOB, ANN_ELSEWHERE):
        assert await preferences_of(preferences, other) == nothing
    for change in (
        {"kinds": notify_pb2.NotificationKinds(kinds=[99])},  # type: ignore[list-item]
        {"quiet": pb.QuietTimes(time_zone="Mars/Olympus")},
    ):
        assert await reason_of(prefer(preferences, **change)) == "INVALID_FIELD"
    assert await prefer(preferences, kinds=notify_pb2.NotificationKinds(), quiet=pb.QuietTimes()) == nothing


async def test_mutes_end_at_their_time_or_when_they_are_taken_back(preferences: PreferenceServiceAsyncStub) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    await mute(preferences, "conv_1")
    await mute(preferences, "conv_2", later)
    await mute(preferences, "conv_3", later - timedelta(hours=2))
    await prefer(preferences, kinds=KINDS)
    until_time = Timestamp()
    until_time.FromDatetime(later)
    found = (await preferences_of(preferences)).mutes
    assert list(found) == [
        pb.Mute(conversation_id="conv_1"),
        pb.Mute(conversation_id="conv_2", until_time=until_time),
    ]
    for _ in range(2):
        ended = pb.UnmuteConversationRequest(conversation_id="conv_1")
        await preferences.UnmuteConversation(ended, metadata=ANN)
    assert [each.conversation_id for each in (await preferences_of(preferences)).mutes] == ["conv_2"]
    assert await reason_of(mute(preferences, "")) == "INVALID_ID"
    wrong = pb.Mute(conversation_id="conv_1", until_time=Timestamp(seconds=2**62))
    muting = preferences.MuteConversation(pb.MuteConversationRequest(mute=wrong), metadata=ANN)
    assert await reason_of(muting) == "INVALID_FIELD"


async def test_a_user_mutes_a_thousand_conversations_at_most(
    preferences: PreferenceServiceAsyncStub, database: Database
) -> None:
    await database.execute(
        "INSERT INTO notifier.mutes (store_id, user_id, conversation_id)"
        " SELECT 'acme', 'ann', 'conv_' || n FROM generate_series(1, 1000) AS n"
    )
    assert await reason_of(mute(preferences, "conv_more")) == "INVALID_FIELD"
    await mute(preferences, "conv_7", datetime.now(UTC))
    await mute(preferences, "conv_more")


async def test_of_a_muted_conversation_the_inbox_tells_and_no_channel(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, preferences: PreferenceServiceAsyncStub
) -> None:
    channel_id, _ = await desk.hook()
    await mute(preferences, "conv_1")
    await store.add([draft("a")])
    skipped = await desk.looked_at(channel_id)
    assert (skipped.state, skipped.last_error, skipped.tries) == (SKIPPED, "its conversation is muted", 0)
    assert not skipped.HasField("next_try_time")
    assert len(await desk.inbox()) == 1
    assert receiver.asked == []
    await desk.resend(skipped)
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED, "its user wants this one"


async def test_in_quiet_hours_deliveries_wait_for_their_end_and_the_inbox_does_not(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer, preferences: PreferenceServiceAsyncStub
) -> None:
    channel_id, _ = await desk.hook()
    now = datetime.now(UTC)
    hours = [f"{(now + timedelta(hours=each)):%H:00}" for each in (-1, 2)]
    quiet = pb.QuietTimes(hours=[pb.QuietHours(start=hours[0], end=hours[1])])
    await prefer(preferences, quiet=quiet)
    await store.add([draft("a")])
    held = await desk.looked_at(channel_id)
    end = (now + timedelta(hours=2)).replace(minute=0, second=0, microsecond=0)
    assert (held.state, held.tries, held.next_try_time.ToDatetime(UTC)) == (WAITING, 0, end)
    assert len(await desk.inbox()) == 1
    assert receiver.asked == []
    await prefer(preferences, quiet=pb.QuietTimes())
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED, "what waits is looked at again"


async def test_mutes_of_an_erased_conversation_go_with_it(
    store: PostgresStore, preferences: PreferenceServiceAsyncStub
) -> None:
    """I13."""
    await mute(preferences, "conv_1")
    part = ErasurePart(store_id=StoreId("acme"), conversation_id=ConversationId("conv_1"), run_ids=[], call_ids=[])
    await store.erase(part)
    assert not (await preferences_of(preferences)).mutes
