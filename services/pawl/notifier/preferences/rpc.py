"""Implements PreferenceService."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pawl.chassis.ids import ConversationId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.notifier.inbox.rpc import WIRE, caller_inbox
from pawl.notifier.preferences.rules import Mute, Preferences, PreferencesChange
from pawl.notifier.preferences.store import PostgresPreferences
from pawl.notify.v1 import preference_pb2 as pb
from pawl.notify.v1 import preference_pb2_grpc

_MUTE: Final = WIRE.struct(Mute, pb.Mute, field="mute")
_PREFERENCES: Final = WIRE.struct(Preferences, pb.Preferences)
_CHANGE: Final = WIRE.struct(PreferencesChange, pb.UpdatePreferencesRequest)


class PreferenceServicer(preference_pb2_grpc.PreferenceServiceServicer):
    """Implements PreferenceService. `on_change` is called after preferences change."""

    def __init__(self, repository: PostgresPreferences, *, on_change: Callable[[], None]) -> None:
        self._repository = repository
        self._on_change = on_change

    async def GetPreferences(self, request: pb.GetPreferencesRequest, context: Context) -> pb.GetPreferencesResponse:
        found = await self._repository.preferences(caller_inbox())
        return pb.GetPreferencesResponse(preferences=_PREFERENCES.fields(found))

    async def UpdatePreferences(
        self, request: pb.UpdatePreferencesRequest, context: Context
    ) -> pb.UpdatePreferencesResponse:
        inbox, change = caller_inbox(), _CHANGE.read(request)
        change.check()
        await self._repository.change(inbox, change)
        self._on_change()
        stored = await self._repository.preferences(inbox)
        return pb.UpdatePreferencesResponse(preferences=_PREFERENCES.fields(stored))

    async def MuteConversation(
        self, request: pb.MuteConversationRequest, context: Context
    ) -> pb.MuteConversationResponse:
        check_id(request.mute.conversation_id, "conversation_id")
        await self._repository.mute(caller_inbox(), _MUTE.read(request.mute))
        return pb.MuteConversationResponse()

    async def UnmuteConversation(
        self, request: pb.UnmuteConversationRequest, context: Context
    ) -> pb.UnmuteConversationResponse:
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id"))
        await self._repository.unmute(caller_inbox(), conversation_id)
        return pb.UnmuteConversationResponse()
