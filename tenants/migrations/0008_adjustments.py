"""Adjustments, and from when on the ledger is kept."""

import django.core.validators
import django.db.models.deletion
from django.db import migrations, models

import tenants.models.fields


class Migration(migrations.Migration):

    dependencies = [
        ("tenants", "0007_usage_project"),
    ]

    operations = [
        migrations.CreateModel(
            name="Adjustment",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.CharField(max_length=32)),
                ("tenant_slug", models.CharField(max_length=64)),
                ("model", models.CharField(blank=True, default="", max_length=200)),
                ("starts_at", models.DateTimeField()),
                ("ends_at", models.DateTimeField()),
                ("amount", tenants.models.fields.MoneyField()),
                (
                    "currency",
                    models.CharField(
                        max_length=3,
                        validators=[
                            django.core.validators.RegexValidator(
                                "^[A-Z]{3}\\Z", "Use a currency code of three capitals, like USD."
                            )
                        ],
                    ),
                ),
                ("reason", models.TextField(max_length=2000)),
                ("author", models.CharField(max_length=200)),
                ("at", models.DateTimeField(auto_now_add=True)),
                (
                    "price",
                    models.ForeignKey(
                        blank=True,
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="+",
                        to="tenants.price",
                    ),
                ),
            ],
            options={
                "ordering": ["-id"],
                "indexes": [
                    models.Index(fields=["tenant_id", "at"], name="adjustment_tenant"),
                    models.Index(fields=["at"], name="adjustment_at"),
                ],
                "constraints": [
                    models.CheckConstraint(
                        condition=models.Q(("starts_at__lt", models.F("ends_at"))), name="adjustment_of_some_time"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("amount", 0), _negated=True), name="adjustment_of_some_amount"
                    ),
                    models.CheckConstraint(
                        condition=models.Q(("reason", ""), _negated=True), name="adjustment_with_a_reason"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="Retention",
            fields=[
                ("id", models.PositiveSmallIntegerField(default=1, primary_key=True, serialize=False)),
                ("kept_since", models.DateTimeField()),
                ("removing", models.BooleanField(default=False)),
            ],
            options={
                "constraints": [models.CheckConstraint(condition=models.Q(("id", 1)), name="retention_has_one_row")],
            },
        ),
    ]
